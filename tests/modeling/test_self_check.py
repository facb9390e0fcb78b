"""Mode ``auto`` captures only where captured steps give the logits of eager ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.modeling import self_check
from autotune.modeling.graph_runner import EagerNotice
from autotune.modeling.self_check import CAPTURED_TOKENS
from autotune.modeling.step import PackedStep
from autotune.modeling.target import Target
from autotune.modeling.tree_model import TreeModel
from autotune.runtime.decoder import Decoder
from autotune.runtime.model_pool import ModelPool
from tests.rehearsal import Rehearsal
from tests.tiny_models import Pair, inputs_on


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
@pytest.mark.parametrize(("dtype", "num_tokens"), [(torch.float32, 4), (torch.bfloat16, CAPTURED_TOKENS)])
def test_auto_captures_after_a_self_test_that_runs_once(
    rehearsal: Rehearsal, text_pair: Pair, dtype: torch.dtype, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two captures, which plain decoding uses as well."""
    monkeypatch.setattr(self_check, "CAPTURED_TOKENS", num_tokens)
    target = Target(copy.deepcopy(text_pair.target).to("cuda:0", dtype))
    with rehearsal.counted() as counts:
        assert Decoder(target).mode == "cuda-graph"
    found = target.captured_steps
    assert found is not None and found.why_eager is None and found.num_tokens == num_tokens + 16
    assert (counts.captures, counts.replays) == (2, num_tokens)
    assert 0.0 <= found.difference <= found.allowed and found.allowed > 0.0
    with rehearsal.counted() as counts:
        decoder = Decoder(target)
        decoder.generate(**inputs_on({"input_ids": torch.arange(5, 15)[None]}, "cuda:0"), max_new_tokens=4)
    assert decoder.mode == "cuda-graph" and (counts.captures, counts.replays) == (0, 3)


def moved(slots: Callable[..., Tensor]) -> Any:
    return lambda *given: slots(*given) + 1


def waiting(forward: Callable[..., Any]) -> Any:
    def run(model: TreeModel, key: Any, integers: Tensor) -> Any:
        integers.sum().item()
        return forward(model, key, integers)

    return run


@pytest.mark.parametrize(
    ("owner", "name", "broken", "reason"),
    [
        (PackedStep, "slots", moved, "runs eagerly in mode auto: captured steps give logits that differ by"),
        (PackedStep, "write", lambda _: None, "runs eagerly in mode auto: captured steps do not run"),
        (TreeModel, "_forward_over_buffers", waiting, "operation not permitted when stream is capturing"),
    ],
    ids=["wrong", "raises", "cannot be captured"],
)
def test_auto_is_eager_where_captured_steps_fail(
    rehearsal: Rehearsal,
    text_pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    broken: Any,
    reason: str,
) -> None:
    """One line says why, once; mode ``cuda-graph`` is not tested."""
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    monkeypatch.setattr("autotune.runtime.model_pool.load_processor", lambda *given, **options: None)
    with pytest.warns(EagerNotice, match=reason) as caught:
        pool = ModelPool(str(text_pair.target_folder), [str(text_pair.draft_folder)], "cuda:0", mode="auto")
        modes = [Decoder(pool.target, mode=mode).mode for mode in ("auto", "cuda-graph")]
    assert len(caught) == 1 and pool.mode == "eager" and pool.capture_sizes == ()
    assert modes == ["eager", "cuda-graph"]
    decoder = Decoder(pool.target)
    decoder.generate(**inputs_on({"input_ids": torch.arange(5, 15)[None]}, "cuda:0"), max_new_tokens=4)
    assert rehearsal.counts.replays <= 4, "the self-test's"


def test_nothing_is_tested_on_a_cpu(text_pair: Pair) -> None:
    decoder = Decoder(text_pair.target)
    assert (decoder.mode, decoder.target.captured_steps) == ("eager", None)
