"""Captured forward passes against eager ones: the same tokens and counts, over fixed buffers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import UserError
from autotune.execution import DEFAULT_CAPTURE_SIZES
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.graph_runner import KV_LENGTH_STEP, EagerNotice, GraphKey, GraphRunner, padded_length
from autotune.modeling.masks import MaskBuffer, first_visible
from autotune.modeling.packed_step import PackedStep, pack, padded_columns
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import as_draft
from tests.drafters.test_feature_draft import STAR_FOR_BOTH, TREES, agreeing_draft
from tests.rehearsal import Rehearsal
from tests.tiny_models import Inputs, Pair, inputs_on, on_device


def decoders(pair: Pair, kind: str, tree: dict[str, Any], mode: str, **options: Any) -> tuple[Decoder, Decoder]:
    """Two decoders with one target and one draft: one in mode ``eager``, one in ``mode``."""
    target = Target(pair.target)
    draft = (
        as_draft(pair.draft)
        if kind == "independent"
        else agreeing_draft(kind, target, injection_layer=2 if kind == "star" else 4)
    )
    eager = Decoder(target, draft, tree=tree, visual_keep=0.5, **options)
    return eager, Decoder(target, draft, tree=tree, visual_keep=0.5, mode=mode, **options)


def runner_of(model: Any, mode: str) -> GraphRunner:
    """The graph runner of a target or draft, whose mode is restored after each request."""
    model.use_mode(mode)
    graph_runner = model.graph_runner
    model.use_mode("eager")
    assert graph_runner is not None
    return graph_runner


@pytest.mark.parametrize("kind", ["independent", "specvlm", *STAR_FOR_BOTH])
def test_fixed_mode_gives_the_tokens_and_counts_of_eager_mode(
    pair: Pair, prompts: dict[str, Inputs], kind: str
) -> None:
    """Both decoders use the same models and caches in turn. Every tree decodes greedily and samples."""
    all_settings = itertools.cycle(({}, {"temperature": 1.0, "seed": 4}))
    for tree in TREES:
        eager, fixed = decoders(pair, kind, tree, "fixed", capture_sizes=(1, 3, 8, 16, 64))
        for inputs, settings in zip(prompts.values(), all_settings, strict=False):
            expected = eager.generate(**inputs, max_new_tokens=24, **settings)
            assert eager.target.graph_runner is None
            found = fixed.generate(**inputs, max_new_tokens=24, **settings)
            assert torch.equal(found.sequences, expected.sequences)
            assert found.stats.accepted_lengths == expected.stats.accepted_lengths
            assert found.stats.draft_forwards == expected.stats.draft_forwards


def test_an_answer_grows_past_its_padded_kv_length(text_pair: Pair) -> None:
    """Also past the capacity of the request before, whose captures refer to another cache."""
    eager, fixed = decoders(text_pair, "independent", TREES[1], "fixed")
    for length, num_tokens in ((10, 4), (KV_LENGTH_STEP - 6, 24), (900, 200)):
        inputs = {"input_ids": torch.arange(length)[None] % 40 + 5}
        expected = eager.generate(**inputs, max_new_tokens=num_tokens)
        found = fixed.generate(**inputs, max_new_tokens=num_tokens)
        assert torch.equal(found.sequences, expected.sequences)
        graph_runner = runner_of(fixed.target, "fixed")
        keys: Any = graph_runner._captured.keys()
        assert max(key.kv_lengths[0] for key in keys) == padded_length(length + num_tokens, fixed.target.cache.capacity)
        assert {key.num_tokens for key in keys} <= set(DEFAULT_CAPTURE_SIZES)


def test_a_key_is_captured_once(pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers keep their addresses."""
    _, fixed = decoders(pair, "dream", TREES[1], "fixed", capture_sizes=(1, 16))
    fixed.generate(**prompts["text"], max_new_tokens=20)
    graph_runner = runner_of(fixed.target, "fixed")
    captured: Any = graph_runner._captured
    assert {key.num_tokens for key in captured} == {16}
    addresses = {key: forward.inputs["integers"].data_ptr() for key, forward in captured.items()}
    monkeypatch.setattr(GraphRunner, "_prepare", None)
    fixed.generate(**prompts["text"], max_new_tokens=20)
    assert {key: forward.inputs["integers"].data_ptr() for key, forward in captured.items()} == addresses
    assert graph_runner.memory_bytes > 0


def test_outputs_stay_valid_after_the_next_forward_pass(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """The draft reads features of several plain steps at once."""
    target = Target(pair.target)
    target.output_layers = (4,)
    target.use_mode("fixed")
    with torch.inference_mode():
        target.reserve(200)
        target.prefill(target.encode(prompts["text"]).prompts[0])
        kept = []
        for token in (7, 8, 9):
            logits = target.step(token)
            kept += [(logits, logits.clone()), (target.hidden[4], target.hidden[4].clone())]
    assert all(torch.equal(out, copied) for out, copied in kept)


def test_an_unknown_or_unavailable_mode_is_refused(pair: Pair) -> None:
    for mode, message in (
        ("cuda-graph", "mode cuda-graph needs a CUDA device; the model is on cpu; choose eager"),
        ("jit", "mode must be eager or cuda-graph; got 'jit'; choose one of these"),
    ):
        with pytest.raises(UserError, match=message):
            Decoder(pair.target, pair.draft, mode=mode)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_unpacked_masks_show_the_tokens_that_masks_of_the_buffer_show(window: int | None) -> None:
    """They equal the buffer's masks from its first visible column on, and hide everything else."""
    rng = np.random.default_rng(window or 0)
    windows = {"layers": window}
    buffer = MaskBuffer(windows, 200, dtype=torch.float32, device=torch.device("cpu"))
    for _ in range(60):
        prefix, num_columns = int(rng.integers(0, 90)), int(rng.integers(1, 100))
        rows = np.sort(rng.choice(num_columns, int(rng.integers(1, num_columns + 1)), replace=False))
        offsets = np.sort(rng.integers(0, 12, num_columns))
        is_visible = rng.random((len(rows), num_columns)) < 0.5
        tree_mask = np.where(is_visible, np.float32(0), np.float32(buffer.mask_value))
        expected = buffer.write(tree_mask, prefix, offsets[rows], offsets)
        assert isinstance(expected, torch.Tensor)
        rows_of_tokens = np.zeros(len(rows), np.int64)
        columns = None if window is None else offsets
        key = GraphKey(len(rows), (KV_LENGTH_STEP,), num_columns=padded_columns(num_columns, 0))
        step = Step(rows_of_tokens, offsets[rows], tree_mask)
        packed = torch.from_numpy(pack(step, [prefix], rows_of_tokens[None], columns, key.num_columns))
        num_words = len(rows) * key.num_columns // 64
        num_offsets = 0 if window is None else key.num_columns
        assert len(packed) == 2 + 3 * len(rows) + num_offsets + num_words, "a bit for each column of the tree"
        found = PackedStep.of(packed, key).masks(
            windows, padded_kv_length=KV_LENGTH_STEP, mask_value=buffer.mask_value, dtype=torch.float32
        )
        mask = found["layers"].numpy()
        assert mask.shape == (1, 1, len(rows), KV_LENGTH_STEP)
        is_limited = window is not None and prefix + int(offsets[rows].max()) >= window
        first = first_visible(prefix, window) if is_limited else 0
        assert np.array_equal(mask[..., first : prefix + num_columns], expected.numpy())
        assert (mask[..., :first] == buffer.mask_value).all()
        assert (mask[..., prefix + num_columns :] == buffer.mask_value).all()


# ------------------------------------------------------------------------------------------------------- CUDA graphs


@pytest.mark.parametrize("kind", ["independent", "dream", pytest.param("star", marks=pytest.mark.nightly)])
def test_cuda_graphs_give_the_tokens_and_counts_of_eager_mode(
    gpu: str, pair: Pair, prompts: dict[str, Inputs], kind: str
) -> None:
    """Memory does not grow with the number of decoded tokens, once the longest request was decoded."""
    eager, graphs = decoders(on_device(pair, gpu), kind, TREES[1], "cuda-graph", capture_sizes=(1, 8, 32))
    inputs = {name: inputs_on(one, gpu) for name, one in prompts.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerNotice)
        for one in inputs.values():
            expected = eager.generate(**one, max_new_tokens=16)
            found = graphs.generate(**one, max_new_tokens=16)
            assert torch.equal(found.sequences, expected.sequences)
            assert found.stats.accepted_lengths == expected.stats.accepted_lengths
    sizes = []
    for number in (16, 1, 5, 16):
        graphs.generate(**inputs["text"], max_new_tokens=number)
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[0] == sizes[-1]


def doubled(inputs: Any) -> tuple[torch.Tensor, ...]:
    return (inputs["x"] * 2,)


def test_a_cuda_graph_is_replayed_with_new_inputs(gpu: str) -> None:
    calls = []

    def function(inputs: Any) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return doubled(inputs)

    runner = GraphRunner("cuda-graph", torch.device(gpu), description="a doubling")
    for number in range(5):
        values = {"x": np.full(3, number, np.float32)}
        (found,) = runner.run(function, GraphKey(3, (256,)), values)
        assert found.tolist() == [2.0 * number] * 3
    assert len(calls) == 3, "two warm-ups, and the capture"


def test_a_capture_is_of_the_model_s_device(rehearsal: Rehearsal) -> None:
    """On ``cuda:1`` while ``cuda:0`` is current, on one stream for all captures, and in one pool."""
    runners = [GraphRunner("cuda-graph", torch.device("cuda:1"), description="a doubling") for _ in range(2)]
    for number, runner in enumerate((*runners, *runners)):
        (found,) = runner.run(doubled, number, {"x": np.full(3, number, np.float32)})
        assert found.device == torch.device("cuda:1") and found.tolist() == [2.0 * number] * 3
    assert torch.cuda.current_device() == 0
    assert (rehearsal.counts.captures, rehearsal.cuda.num_streams) == (4, 1)
    assert len({graph.pool() for graph in rehearsal.cuda.graphs}) == 1


def test_a_failed_capture_names_its_cause_and_restores_the_stream(rehearsal: Rehearsal) -> None:
    def waits(inputs: Any) -> tuple[torch.Tensor, ...]:
        return (inputs["x"] * int(inputs["x"].sum().item()),)

    runner = GraphRunner("cuda-graph", torch.device("cuda:0"), description="a product")
    stream = torch.cuda.current_stream()
    with pytest.warns(EagerNotice, match="not permitted when stream is capturing"):
        (found,) = runner.run(waits, "key", {"x": np.full(3, 2, np.float32)})
    assert found.tolist() == [12.0] * 3
    assert torch.cuda.current_stream() is stream
    assert runner.why_eager is not None and "item" in runner.why_eager


def test_the_least_recently_used_capture_is_dropped(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = graph_memory(torch.device("cuda:0"))
    monkeypatch.setattr(memory, "limit", 3)
    runners = [GraphRunner("cuda-graph", memory.device, description="a doubling") for _ in range(2)]

    def run(runner: int, key: int) -> None:
        (found,) = runners[runner].run(doubled, key, {"x": np.full(100, key, np.float32)})
        assert found.tolist() == [2.0 * key] * 100

    for runner, key in ((0, 1), (1, 1), (0, 2), (0, 1), (1, 2)):  # the last one drops key 1 of the second runner
        run(runner, key)
    live = rehearsal.live_bytes
    assert (len(memory), [len(runner) for runner in runners]) == (3, [2, 1])
    for key in range(20):
        run(key % 2, key)
    assert (len(memory), rehearsal.live_bytes) == (3, live)
    assert memory.memory_bytes == live
    del runners[:]
    assert (len(memory), rehearsal.live_bytes) == (0, 0)


def test_attention_never_uses_cudnn_on_a_gpu(rehearsal: Rehearsal, pair: Pair) -> None:
    """It builds a plan for every new shape, and corrupts the output of models with few KV heads."""
    with attention_restored():
        torch.backends.cuda.enable_cudnn_sdp(True)
        Target(pair.target)
        assert torch.backends.cuda.cudnn_sdp_enabled(), "of a CPU nothing is changed"
        Target(on_device(pair, "cuda:0").target)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()


@contextmanager
def attention_restored() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
