"""Answers of a profile that differ from plain decoding on held-out prompts."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch

from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, Differences
from autotune.drafters.independent import IndependentDraft
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runtime_arms import DecoderArm, RuntimeArms
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.search.held_out import differences_of
from autotune.workloads.workload import Workload, load_workload
from tests.sample_documents import write_workload
from tests.tiny_models import Pair

NUM = 8


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("held-out")
    prompts = [{"prompt": f"Go on with number {n}.", "split": "evaluate", "max_new_tokens": 60} for n in range(NUM)]
    return load_workload(str(write_workload(folder, prompts)), "evaluate")


def compared(
    pair: Pair, processor: Any, dtype: torch.dtype, workload: Workload
) -> tuple[DecoderArm, dict[str, list[Decoded]]]:
    """The profile's arm, and its runs beside those of plain decoding."""
    target, draft = (deepcopy(model).to(dtype) for model in (pair.target, pair.draft))
    arms = RuntimeArms(Decoder(Target(target), IndependentDraft(draft)), processor)
    tuned = DecoderArm(TUNED, arms.decoder, arms)
    return tuned, race(ArmRunner(), [arms.plain, tuned], workload.prompts, Everyone()).runs


def with_wrong_token(run: Decoded) -> Decoded:
    return run.model_copy(update={"tokens": [*run.tokens[:3], 5, *run.tokens[4:]], "tokens_sha256": "other"})


def test_answers_that_differ_by_rounding_are_told_from_others(
    pair: Pair, processor: Any, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 some answers leave plain decoding at a near tie. They are not decoded again to find that out."""
    tuned, runs = compared(pair, processor, torch.bfloat16, workload)
    num = sum(a.tokens_sha256 != b.tokens_sha256 for a, b in zip(runs[AR], runs[TUNED], strict=True))
    assert 0 < num < NUM, "the test proves nothing"

    def decode_again(*_: Any) -> None:
        raise AssertionError("answers are known")

    monkeypatch.setattr(DecoderArm, "generate", decode_again)
    assert differences_of(tuned, workload, runs, math.inf) == Differences(rounding=num)
    assert differences_of(tuned, workload, runs, 0.0) == Differences(unexamined=num), "no time was left"

    wrong = {**runs, TUNED: [with_wrong_token(runs[TUNED][0]), *runs[TUNED][1:]]}
    found = differences_of(tuned, workload, wrong, math.inf)
    (other,) = found.other
    assert other.startswith("workload.jsonl:1: token 3: ") and other.endswith(": not a tie")
    assert found.rounding >= num - 1 and found.unexamined == 0


def test_in_float32_no_difference_is_rounding(pair: Pair, processor: Any, workload: Workload) -> None:
    """By the rule of ``autotune check``, even where two logits are nearly equal."""
    one = workload.cut(1)
    tuned, runs = compared(pair, processor, torch.float32, one)
    assert differences_of(tuned, one, runs, math.inf) == Differences()
    found = differences_of(tuned, one, {**runs, TUNED: [with_wrong_token(runs[TUNED][0])]}, math.inf)
    assert (found.rounding, len(found.other), found.unexamined) == (0, 1, 0)
