"""Mode ``compile`` on a GPU: fewer kernels a round, and the same tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.self_check import allowed_difference, compare_tree_decoding
from autotune.modeling.target import Target
from autotune.modeling.tree_model import TreeModel
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import as_draft
from tests.kernels import captured_kernels, compiled_kernels
from tests.rehearsal import Rehearsal
from tests.tiny_models import Inputs, Pair, inputs_on, new_llama, on_device

LAYERS = 32
SHARE = 0.35  # of the captured kernels, at most, is left by the compiler


def llama(num_layers: int) -> LlamaForCausalLM:
    """Grouped queries, in a precision that casts."""
    return new_llama(num_layers).bfloat16()


def one_layer(target: Target) -> Any:
    return as_draft(llama(1).to(target.device))


@pytest.mark.nightly
def test_compiling_leaves_a_third_of_a_round_s_kernels() -> None:
    """Layers after the first add the same number of kernels each, hence two targets bound the number of any other."""
    tree = {"policy": "eagle2", "depth": 2, "k": 4, "budget": 8}
    small, large = (functools.partial(llama, number) for number in (1, 2))
    captured, compiled = captured_kernels(small, one_layer, tree), compiled_kernels(small, one_layer, tree)
    captured_layer = captured_kernels(large, one_layer, tree).verification - captured.verification
    compiled_layer = compiled_kernels(large, one_layer, tree).verification - compiled.verification
    assert (captured, captured_layer) == ((283, 113), 40), "what the bounds below are relative to"
    assert compiled.drafting <= 47 and compiled.verification <= 19 and compiled_layer <= 14
    assert compiled.verification + (LAYERS - 1) * compiled_layer <= SHARE * (113 + (LAYERS - 1) * 40)
    assert compiled.drafting <= SHARE * captured.drafting


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
def test_compiled_rounds_are_captured_ahead_on_a_gpu(
    rehearsal: Rehearsal, pair: Pair, prompts: dict[str, Inputs]
) -> None:
    """The rehearsal compiles nothing: it shows what is captured, not what torch makes of it."""
    pair, inputs = on_device(pair, "cuda:0"), inputs_on(prompts["text"], "cuda:0")
    tree = {"policy": "eagle2", "depth": 3, "k": 3, "budget": 8}
    target, draft = Target(pair.target), as_draft(pair.draft)
    options: dict[str, Any] = {"tree": tree, "capture_sizes": (1, 8)}
    expected = Decoder(target, draft, mode="cuda-graph", **options).generate(**inputs, max_new_tokens=12)
    compiled = Decoder(target, draft, mode="compile", **options)
    assert compiled.prepare(100).num_captures > 0
    before = graph_memory(target.device).num_kept
    with rehearsal.counted() as counts:
        found = compiled.generate(**inputs, max_new_tokens=12)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.stats.accepted_lengths == expected.stats.accepted_lengths
    assert graph_memory(target.device).num_kept == before, "nothing was left to capture"
    assert counts.replays == 2 * found.stats.rounds


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_agree_with_transformers_as_the_self_check_asks(dtype: torch.dtype) -> None:
    model = TreeModel(new_llama(4).to(dtype))
    model.use_mode("compile")
    difference, noise = compare_tree_decoding(model)
    assert model.graph_runner is not None and model.graph_runner.why_eager is None
    assert difference <= allowed_difference(model, noise)
