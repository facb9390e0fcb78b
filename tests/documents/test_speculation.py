"""Settings of an engine's speculation: their depths, their models, and depths by the number of requests."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from autotune.documents.speculation import OPTIONS, ModelType, Speculation
from autotune.engines.llama_cpp import llama_arguments
from autotune.engines.vllm import vllm_arguments
from autotune.errors import UserError


@pytest.mark.parametrize("kind", OPTIONS)
def test_settings_at_another_depth_differ_in_the_depth_alone(kind: str) -> None:
    is_chain = kind in get_args(ModelType)
    given = Speculation(type=kind, options=OPTIONS[kind], model="m" if is_chain else "")
    changed = given.at_depth(2)
    assert changed is not None and changed.depth == 2 and given.at_depth(0) is None
    differing = {name for name in given.options if given.options[name] != changed.options[name]}
    assert differing == {list(OPTIONS[kind])[-1], *(["n-min"] if kind == "ngram-mod" else [])}
    assert changed.key != given.key and changed.at_depth(int(given.depth or 0)) == (
        given if kind != "ngram-mod" else given.model_copy(update={"options": given.options | {"n-min": 2}})
    )


def test_a_type_of_another_engine_has_no_depth() -> None:
    other = Speculation(type="lookahead", options={"window": 5})
    assert other.depth is None
    with pytest.raises(UserError, match=r"^lookahead: the option"):
        other.at_depth(2)


def test_depths_by_the_number_of_requests_are_vllms_argument() -> None:
    head = Speculation(type="mtp", options=OPTIONS["mtp"])
    scheduled = head.model_copy(update={"schedule": [(1, 4, 3), (5, 256, 0)]})
    assert Speculation.model_validate_json(scheduled.model_dump_json()) == scheduled and scheduled.key != head.key
    _, config = vllm_arguments(scheduled)
    rows = [[1, 4, 3], [5, 256, 0]]
    assert json.loads(config) == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": rows,
    }


def test_a_head_of_the_targets_own_files_has_no_model() -> None:
    assert llama_arguments(Speculation(type="draft-mtp", options={"n-max": 2})) == [
        *("--spec-type", "draft-mtp"),
        *("--spec-draft-n-max", "2"),
    ]
    with pytest.raises(ValueError, match="dflash needs a model"):
        Speculation(type="dflash", options=OPTIONS["dflash"])
    with pytest.raises(ValueError, match="suffix has no model"):
        Speculation(type="suffix", options=OPTIONS["suffix"], model="m")
