"""Captured forward passes against eager ones: the same tokens and counts, over fixed buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autotune.cost.roofline import KERNELS_OUTSIDE
from autotune.errors import UserError
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.graph_runner import EagerNotice, GraphKey, GraphRunner
from autotune.modeling.masks import TreeMasks, first_visible
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.step import HEADER, Layout, PackedStep, Step, padded_columns
from autotune.modeling.target import Target
from autotune.modeling.tree_attention import additive_mask
from autotune.modeling.tree_model import FeatureRows
from autotune.runtime.decoder import Decoder
from autotune.trees.limits import MAX_STEP
from tests.rehearsal import Rehearsal
from tests.rehearsed_cuda import CudaError, tensors_of
from tests.tiny_models import Pair, on_device


def test_held_rows_are_moved_before_their_memory_is_full() -> None:
    """A draft has read what it held before, and holds rows of the latest pass alone."""
    rows = FeatureRows(2, dtype=torch.float32, device=torch.device("cpu"))
    content = {}
    for number in range(40):
        states = torch.full((MAX_STEP, 2), float(number))
        states[:, 1] = torch.arange(MAX_STEP)
        rows.write({3: states})
        if rows.is_full:
            rows.release()
            content.clear()
        for row, token in zip(rows.hold(np.array([0, 5, 20])), (0, 5, 20), strict=True):
            content[row] = [float(number), float(token)]
        assert {row: rows.layers[3][row].tolist() for row in content} == content
    assert len(content) == 3 or len(content) == 6


def test_an_unknown_or_unavailable_mode_is_refused(pair: Pair) -> None:
    for mode, message in (
        ("cuda-graph", "mode cuda-graph needs a CUDA device; the model is on cpu; choose eager"),
        ("jit", "mode must be eager, cuda-graph or compiled; got 'jit'; choose one of these"),
    ):
        with pytest.raises(UserError, match=message):
            Decoder(pair.target, pair.draft, mode=mode)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_unpacked_masks_show_the_tokens_that_masks_of_the_buffer_show(window: int | None) -> None:
    """They equal the buffer's masks from its first visible column on, and hide everything else."""
    rng = np.random.default_rng(window or 0)
    buffer = TreeMasks({"layers": window}, dtype=torch.float32, device=torch.device("cpu"))
    for _ in range(60):
        prefix, num_columns, length = int(rng.integers(0, 90)), int(rng.integers(1, 100)), 256
        rows = np.sort(rng.choice(num_columns, int(rng.integers(1, num_columns + 1)), replace=False))
        offsets = np.sort(rng.integers(0, 12, num_columns))
        is_visible = rng.random((len(rows), num_columns)) < 0.5
        tree_mask = np.where(is_visible, np.float32(0), np.float32(buffer.mask_value))
        expected = buffer.write(tree_mask, prefix, offsets[rows], offsets)
        assert isinstance(expected, torch.Tensor)
        layout = Layout(len(rows), padded_columns(num_columns, 0), num_masks=2, num_rows=1)
        integers = np.full(sum(layout.sizes), -1)
        step = Step(np.arange(len(rows)), offsets[rows], tree_mask)
        written = PackedStep.of(integers, layout)
        written.write(step, np.array([3, prefix]), np.array([0, window or 0]), offsets)
        found = PackedStep.of(torch.from_numpy(integers), layout)
        assert found.tokens.tolist() == step.tokens.tolist() and len(found.header) == HEADER
        assert found.slots(1).tolist() == list(range(prefix + num_columns - len(rows), prefix + num_columns))
        options = {"mask_value": buffer.mask_value, "dtype": torch.float32}
        mask = additive_mask(found.masks[1], length, **options).numpy()
        assert mask.shape == (1, 1, len(rows), length)
        is_limited = window is not None and prefix + int(offsets[rows].max()) >= window
        first = first_visible(prefix, window) if is_limited else 0
        assert np.array_equal(mask[..., first : prefix + num_columns], expected.numpy())
        assert (mask[..., :first] == buffer.mask_value).all()
        assert (mask[..., prefix + num_columns :] == buffer.mask_value).all()


# -------- CUDA graphs


def doubled(integers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values = integers[HEADER:].float() * 2
    return values.int(), values


def run(runner: GraphRunner, function: Any, key: Any, values: Sequence[int]) -> torch.Tensor:
    """Run a function over some integers; returns its second output, once the first is on the host."""
    forward = runner.prepared(GraphKey(Layout(len(values), 0, 0, 0), addresses=(key,)))
    forward.step.tokens[:] = values
    runner.launch(forward, function)
    assert forward.wait().tolist() == forward.outputs[0].tolist()
    return forward.outputs[0]


def test_a_cuda_graph_is_replayed_with_new_inputs(gpu: str) -> None:
    calls = []

    def function(integers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return doubled(integers)

    runner = GraphRunner("cuda-graph", torch.device(gpu), description="a doubling")
    for number in range(5):
        assert run(runner, function, 0, [number] * 3).tolist() == [2.0 * number] * 3
    assert len(calls) == 3, "two warm-ups, and the capture"


def test_an_input_that_a_graph_may_still_read_is_not_written(rehearsal: Rehearsal) -> None:
    runner = GraphRunner("cuda-graph", torch.device("cuda:0"), description="a doubling")
    run(runner, doubled, 0, [1, 2])
    forward = runner.prepared(GraphKey(Layout(2, 0, 0, 0), addresses=(0,)))
    with rehearsal.counted() as counts:
        runner.launch(forward, doubled)
        assert (forward.result != [2, 4]).all(), "not there yet"
        assert runner.prepared(GraphKey(Layout(2, 0, 0, 0), addresses=(0,))) is forward
        assert forward.result.tolist() == [2, 4]
    assert (counts.waits, counts.to_device, counts.to_host, counts.operations) == (1, 1, 1, 0)
    runner.launch(forward, doubled)
    forward.step.tokens[:] = 5
    with pytest.raises(CudaError, match="pinned memory was written while a graph read it"):
        forward.wait()


def test_a_capture_is_of_the_model_s_device(rehearsal: Rehearsal) -> None:
    """On ``cuda:1`` while ``cuda:0`` is current, on one stream for all captures, and in one pool."""
    runners = [GraphRunner("cuda-graph", torch.device("cuda:1"), description="a doubling") for _ in range(2)]
    for number, runner in enumerate((*runners, *runners)):
        found = run(runner, doubled, number, [number] * 3)
        assert found.device == torch.device("cuda:1") and found.tolist() == [2.0 * number] * 3
    assert torch.cuda.current_device() == 0
    assert (rehearsal.counts.captures, rehearsal.cuda.num_streams) == (4, 1)
    assert len({graph.pool() for graph in rehearsal.cuda.graphs}) == 1


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_estimates_count_the_kernels_of_a_captured_step(kind: str, rehearsal: Rehearsal) -> None:
    """In 16 bits, in which norms convert their input. An operation that only views its input is no kernel."""

    def storages(values: Any) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in tensors_of([values])}

    counts, sizes = [], {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8}
    for num_layers in (1, 2):
        config = AutoConfig.for_model(kind, num_hidden_layers=num_layers, vocab_size=50, num_key_value_heads=2, **sizes)
        target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda:0").eval())
        target.use_mode("cuda-graph")
        token = torch.zeros(1, dtype=torch.long, device="cuda:0")
        target.prefill_prompt(EncodedPrompt(token, token.bool()))
        target.forward(Step.causal(np.zeros(8, np.int64), target.mask_value))
        calls = max((graph.calls for graph in rehearsal.cuda.graphs), key=len)
        counts.append(
            sum(call.function._schema.is_mutable or not storages(call.outputs) <= storages(call.args) for call in calls)
        )
    assert counts[1] - counts[0] == target.shape.layer_kernels
    assert 2 * counts[0] - counts[1] == pytest.approx(KERNELS_OUTSIDE, abs=5)


def test_a_failed_capture_names_its_cause_and_restores_the_stream(rehearsal: Rehearsal) -> None:
    def waits(integers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = integers[HEADER:] * int(integers[HEADER:].sum().item())
        return values.int(), values

    runner = GraphRunner("cuda-graph", torch.device("cuda:0"), description="a product")
    stream = torch.cuda.current_stream()
    with pytest.warns(EagerNotice, match="not permitted when stream is capturing"):
        found = run(runner, waits, 0, [2] * 3)
    assert found.tolist() == [12.0] * 3
    assert torch.cuda.current_stream() is stream
    assert runner.why_eager is not None and "item" in runner.why_eager


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
def test_a_capture_that_lacks_memory_takes_the_place_of_the_others(rehearsal: Rehearsal) -> None:
    memory = graph_memory(torch.device("cuda:0"))
    runner = GraphRunner("cuda-graph", memory.device, description="a doubling")
    for key in range(3):
        run(runner, doubled, key, [1] * 1000)
    rehearsal.cuda.memory_bytes = (
        rehearsal.live_bytes + 20_000
    )  # the new one has inputs of 16,000 bytes and outputs of 8,000
    found = run(runner, doubled, 9, [1] * 2000)
    assert found.tolist() == [2.0] * 2000 and not runner.runs_eagerly
    assert (len(memory), memory.num_kept, memory.num_dropped) == (1, 4, 3)


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
def test_another_thread_does_not_end_a_capture(rehearsal: Rehearsal) -> None:
    """As a server's does, which reads from the device at any time."""
    others, read = torch.ones(3, device="cuda:0"), []

    def beside(integers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        thread = threading.Thread(target=lambda: read.append(others.cpu().tolist()))
        thread.start()
        thread.join()
        return doubled(integers)

    runner = GraphRunner("cuda-graph", torch.device("cuda:0"), description="a doubling")
    found = run(runner, beside, 0, [1] * 3)
    assert found.tolist() == [2.0] * 3 and read == [[1.0] * 3] * 3


@pytest.mark.parametrize(("name", "limit"), [("limit", 3), ("limit_bytes", 3 * 1248)])
def test_the_least_recently_used_capture_is_dropped(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    """Beyond a number, and beyond the bytes of 100 inputs and outputs each."""
    memory = graph_memory(torch.device("cuda:0"))
    monkeypatch.setattr(memory, name, limit)
    runners = [GraphRunner("cuda-graph", memory.device, description="a doubling") for _ in range(2)]

    def run_key(runner: int, key: int) -> None:
        found = run(runners[runner], doubled, key, [key] * 100)
        assert found.tolist() == [2.0 * key] * 100

    for runner, key in ((0, 1), (1, 1), (0, 2), (0, 1), (1, 2)):  # the last one drops key 1 of the second runner
        run_key(runner, key)
    live = rehearsal.live_bytes
    assert (len(memory), [len(runner) for runner in runners]) == (3, [2, 1])
    for key in range(20):
        run_key(key % 2, key)
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
