"""Attention that reads the KV length from a buffer, against masks over the cached tokens, and its captures and compilations."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from autotune.errors import UserError
from autotune.modeling import flex_attention
from autotune.modeling.flex_attention import BLOCK, TreeBlockMask, block_masks, mask_inputs, tree_attention
from autotune.modeling.graph_runner import KV_LENGTH_STEP, EagerNotice
from autotune.modeling.masks import padded_masks
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from tests.block_attention import block_attention, is_listed
from tests.drafters.test_feature_draft import TREES
from tests.modeling.test_graph_runner import decoders, runner_of
from tests.rehearsal import Rehearsal
from tests.tiny_models import Inputs, Pair, inputs_on, on_device

CAPACITY = 2 * KV_LENGTH_STEP
HIDDEN = float(torch.finfo(torch.float32).min)


def text_of(num_tokens: int) -> Inputs:
    return {"input_ids": torch.arange(num_tokens)[None] % 40 + 5}


def random_step(
    rng: np.random.Generator, *, num_rows: int, capacity: int, prefix: int | None = None
) -> tuple[int, Any, Any, Any]:
    """Prefix, tree mask, offsets of rows and of columns; every row sees itself."""
    num_columns = num_rows + int(rng.integers(0, 9))
    prefix = int(rng.integers(0, capacity - num_columns + 1)) if prefix is None else prefix
    offsets = np.sort(rng.integers(0, 12, num_columns))
    visible = rng.random((num_rows, num_columns)) < 0.5
    visible[np.arange(num_rows), np.arange(num_columns - num_rows, num_columns)] = True
    return prefix, np.where(visible, np.float32(0), np.float32(HIDDEN)), offsets[-num_rows:], offsets


def new_mask(step: tuple[int, Any, Any, Any], window: int | None, *, capacity: int) -> TreeBlockMask:
    prefix, tree_mask, rows, columns = step
    windows = {"layers": window}
    tensors = map(torch.from_numpy, (tree_mask, np.array(prefix), rows, columns))
    slots = torch.arange(prefix + len(columns) - len(rows), prefix + len(columns))
    inputs = mask_inputs(windows, *tensors, mask_value=HIDDEN)
    return block_masks(inputs, slots, windows, capacity=capacity)["layers"]


def dense_mask(step: tuple[int, Any, Any, Any], window: int | None, *, capacity: int) -> Tensor:
    """Keys that ``padded_masks`` show, [rows, capacity]."""
    prefix, tree_mask, rows, columns = step
    masks = padded_masks(
        {"layers": window}, tree_mask, prefix, rows, columns, padded_kv_length=capacity, mask_value=HIDDEN
    )
    return torch.from_numpy(masks["layers"][0, 0] == 0)


@pytest.fixture
def block_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """``block_attention`` in place of the kernel."""
    monkeypatch.setattr(flex_attention, "flex_attention", block_attention)
    flex_attention._compiled.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 5, 140])
def test_a_block_mask_shows_what_padded_masks_show_and_reads_no_further_block(window: int | None) -> None:
    rng = np.random.default_rng(window or 0)
    for number in range(60):
        step = random_step(rng, num_rows=int(rng.integers(1, 160 if number == 0 else 20)), capacity=CAPACITY)
        mask, expected = new_mask(step, window, capacity=CAPACITY), dense_mask(step, window, capacity=CAPACITY)
        rows, slots = torch.arange(len(expected)), torch.arange(CAPACITY)
        assert torch.equal(mask.mask_mod(rows, rows, rows[:, None], slots), expected)
        listed = is_listed(mask)
        assert (listed | ~expected).all(), "all visible keys are read"
        prefix, _, row_offsets, column_offsets = step
        end = prefix + len(column_offsets)
        begin = 0 if window is None else max(0, min(prefix, prefix + int(row_offsets.min()) - window + 1))
        is_read = (slots >= begin // BLOCK * BLOCK) & (slots < -(-end // BLOCK) * BLOCK)
        assert torch.equal(listed, is_read.expand_as(listed))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("fixed-flex", "independent"),
        ("fixed-flex", "dream"),
        pytest.param("fixed-flex", "specvlm", marks=pytest.mark.nightly),
        pytest.param("fixed-flex", "star", marks=pytest.mark.nightly),
        pytest.param("compile-flex", "independent", marks=pytest.mark.nightly),
        pytest.param("compile-flex", "star", marks=pytest.mark.nightly),
    ],
)
def test_outputs_equal_those_of_masks(
    pair: Pair, prompts: dict[str, Inputs], block_kernel: None, monkeypatch: pytest.MonkeyPatch, mode: str, kind: str
) -> None:
    """Text and image, greedy and sampled, of an independent draft and of those that read features and cross."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, **options, backend="eager"))
    for tree in TREES if mode == "fixed-flex" else TREES[1:2]:
        eager, flex = decoders(pair, kind, tree, mode, capture_sizes=(16, 64))
        with warnings.catch_warnings():
            warnings.simplefilter("error", EagerNotice)
            for settings in ({}, {"temperature": 1.0, "seed": 4}):
                for name in ("text", "image"):
                    expected = eager.generate(**prompts[name], max_new_tokens=12, **settings)
                    found = flex.generate(**prompts[name], max_new_tokens=12, **settings)
                    assert torch.equal(found.sequences, expected.sequences), tree
                    assert found.stats.accepted_lengths == expected.stats.accepted_lengths
        for model in (flex.target, flex.draft):
            assert runner_of(model, mode).why_eager is None


@pytest.mark.parametrize("kind", ["independent", pytest.param("dream", marks=pytest.mark.nightly)])
def test_one_capture_serves_all_lengths(rehearsal: Rehearsal, pair: Pair, kind: str) -> None:
    """In rounds that the device leads, prepared ahead, as masks of padded lengths are captured for each; memory does not grow."""
    pair, num_captures = on_device(pair, "cuda:0"), {}
    for mode in ("cuda-graph", "cuda-graph-flex"):
        plain, decoder = decoders(pair, kind, TREES[1], mode, capture_sizes=(16,))
        num_captures[mode] = decoder.prepare(3 * KV_LENGTH_STEP).num_captures
    plain.mode = "eager"
    plain.configure(TREES[1])
    captures, live = rehearsal.counts.captures, []
    for length in (20, KV_LENGTH_STEP + 20, 2 * KV_LENGTH_STEP + 20, 20):
        inputs = inputs_on(text_of(length), "cuda:0")
        expected = plain.generate(**inputs, max_new_tokens=6)
        found = decoder.generate(**inputs, max_new_tokens=6)
        assert torch.equal(found.sequences.cpu(), expected.sequences.cpu())
        assert found.stats.accepted_lengths == expected.stats.accepted_lengths
        live.append(rehearsal.live_bytes)
    assert rehearsal.counts.captures == captures
    assert live[0] == live[-1]
    # Padded lengths are 256, 512 and 1,024 tokens; those of blocks that cross, and of others, make further pairs.
    assert 0 < 3 * num_captures["cuda-graph-flex"] <= num_captures["cuda-graph"]


def test_an_answer_grows_past_padded_lengths_and_capacities(text_pair: Pair) -> None:
    eager, flex = decoders(text_pair, "independent", TREES[1], "fixed-flex")
    for length, num_tokens in ((10, 4), (KV_LENGTH_STEP - 6, 24), (1000, 40)):
        expected = eager.generate(**text_of(length), max_new_tokens=num_tokens)
        assert torch.equal(flex.generate(**text_of(length), max_new_tokens=num_tokens).sequences, expected.sequences)
    captured: Any = runner_of(flex.target, "fixed-flex")._captured
    assert len(captured) == len({key.num_tokens for key, _ in captured})


def test_all_lengths_share_compiled_code(pair: Pair, block_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the length that is the whole cache."""
    counter, compiled = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, **options, backend=counter))
    eager, flex = decoders(pair, "star", TREES[1], "compile-flex", capture_sizes=(16,))
    for model in (flex.target, flex.draft):
        model.reserve(4 * KV_LENGTH_STEP)
    graphs = []
    for length in (20, KV_LENGTH_STEP + 20, 3 * KV_LENGTH_STEP + 20):
        found = flex.generate(**text_of(length), max_new_tokens=6)
        assert torch.equal(found.sequences, eager.generate(**text_of(length), max_new_tokens=6).sequences)
        graphs.append(counter.frame_count)
    assert graphs == [graphs[0]] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_equals_masked_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch compiles it for this machine, once for each number of tokens, whatever the length."""
    counter, compiled = CompileCounterWithBackend("inductor"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, **options, backend=counter))
    flex_attention._compiled.cache_clear()
    rng, generator, capacity = np.random.default_rng(0), torch.Generator().manual_seed(0), 12 * KV_LENGTH_STEP
    for num_rows, kv_heads, window in ((1, 2, None), (5, 4, 40), (64, 2, None)):
        counter.clear()
        key, value = torch.randn(2, 1, kv_heads, capacity, 64, generator=generator).to(dtype)
        for prefix in (1, 127, 128, 1000, 2900):
            query = torch.randn(1, 4, num_rows, 64, generator=generator).to(dtype)
            step = random_step(rng, num_rows=num_rows, capacity=capacity, prefix=prefix)
            with torch.inference_mode():
                mask = new_mask(step, window, capacity=capacity)
                found = flex_attention._run_kernel(query, key, value, mask, None).float()
            visible = dense_mask(step, window, capacity=capacity)
            parts = query.float(), key.float(), value.float()
            expected = scaled_dot_product_attention(*parts, attn_mask=visible, enable_gqa=True)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        assert counter.frame_count == 1
    flex_attention._compiled.cache_clear()


@pytest.mark.nightly
def test_compiled_outputs_equal_those_of_masks(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """With torch's own compiler and kernel."""
    flex_attention._compiled.cache_clear()
    eager, flex = decoders(pair, "star", TREES[1], "compile-flex", capture_sizes=(4, 16))
    for name in ("text", "image"):
        expected = eager.generate(**prompts[name], max_new_tokens=24)
        assert torch.equal(flex.generate(**prompts[name], max_new_tokens=24).sequences, expected.sequences)
    for model in (flex.target, flex.draft):
        assert runner_of(model, "compile-flex").why_eager is None
    flex_attention._compiled.cache_clear()


def new_llama(**settings: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    model = LlamaForCausalLM(config).eval()
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


def test_models_whose_scores_are_changed_are_refused() -> None:
    with_sinks = new_llama()
    with_sinks.model.layers[0].self_attn.sinks = torch.zeros(4)
    for model, reason in (
        (new_llama(_attn_implementation="eager"), "its attention is 'eager', not 'sdpa'"),
        (new_llama(attn_logit_softcapping=50.0), "it caps attention scores"),
        (with_sinks, "its attention has sinks"),
    ):
        message = rf"mode fixed-flex cannot run a model of type llama: {reason}; choose fixed"
        with pytest.raises(UserError, match=message):
            Decoder(model, mode="fixed-flex")
        with pytest.raises(UserError, match=message):
            Decoder(new_llama(), model, mode="fixed-flex")
    with pytest.raises(UserError, match="mode cuda-graph-flex needs a CUDA device"):
        Decoder(new_llama(), mode="cuda-graph-flex")
    with pytest.raises(
        UserError, match="cannot run attention with softcap, as this model has; choose one without -flex"
    ):
        flex_attention.refuse_changed_scores({"softcap": 30.0, "s_aux": None})


def test_shapes_that_the_kernel_does_not_take_are_refused(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a defect of autotune, and with the mode that takes them."""

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise torch._dynamo.exc.InternalTorchDynamoError("NYI: embedding dimension must be at least 16")

    monkeypatch.setattr(flex_attention, "flex_attention", refuse)
    flex_attention._compiled.cache_clear()
    model = new_llama().to("cuda:0")
    message = (
        r"cannot be compiled for \d+ queries of 4 heads of 8, 2 KV heads \(NYI: .* at least 16\); choose a mode without"
    )
    with pytest.warns(EagerNotice), pytest.raises(UserError, match=message):
        Decoder(model, mode="cuda-graph-flex").generate(**inputs_on(text_of(9), "cuda:0"), max_new_tokens=4)


def test_a_part_of_a_block_mask_is_refused() -> None:
    """Models that take all rows of their masks get the mask itself."""
    mask = new_mask((3, np.zeros((2, 2), np.float32), np.arange(2), np.arange(2)), None, capacity=CAPACITY)
    assert mask[:, :, 0:, :] is mask
    with pytest.raises(NotImplementedError, match="no part"):
        mask[:, :, -1:, :]


def test_attention_on_a_cpu_equals_the_kernel(block_kernel: None) -> None:
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    query = torch.randn(1, 4, 6, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, CAPACITY, 8, generator=generator)
    for window in (None, 20):
        mask = new_mask(random_step(rng, num_rows=6, capacity=CAPACITY), window, capacity=CAPACITY)
        expected = block_attention(query, key, value, block_mask=mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(tree_attention(query, key, value, mask, scale=0.3), expected)


def test_default_modes_make_no_block_masks(pair: Pair) -> None:
    target = Target(pair.target)
    for mode, has_block_masks in (("fixed", False), ("compile", False), ("fixed-flex", True), ("eager", False)):
        target.use_mode(mode)
        assert target.has_block_masks is has_block_masks
