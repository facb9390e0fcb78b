"""Prepared forwards against eager ones: the same tokens and counts, over buffers that stay where they are."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import UserError
from autotune.execution import DEFAULT_CAPTURE_SIZES, EAGER, MODES
from autotune.modeling.graph_runner import (
    KV_LENGTH_STEP,
    DeviceStep,
    EagerNotice,
    GraphKey,
    GraphRunner,
    padded_length,
    padded_masks,
)
from autotune.modeling.masks import MaskBuffer, first_visible
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import as_draft
from tests.drafters.test_feature_draft import KINDS, TREES, agreeing_draft
from tests.tiny_models import Inputs, Pair

HERE = [name for name in MODES if name not in (EAGER, "cuda-graph")]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def decoders(pair: Pair, kind: str, tree: dict[str, Any], mode: str, **options: Any) -> tuple[Decoder, Decoder]:
    """Of one target and one draft: eager, and by ``mode``."""
    target = Target(pair.target)
    draft = (
        as_draft(pair.draft)
        if kind == "independent"
        else agreeing_draft(kind, target, injection_layer=2 if kind == "star" else 4)
    )
    eager = Decoder(target, draft, tree=tree, visual_keep=0.5, **options)
    return eager, Decoder(target, draft, tree=tree, visual_keep=0.5, mode=mode, **options)


def runner_of(decoder: Decoder) -> GraphRunner:
    """The graph runner of a decoder's target, which is restored to eager forward passes after each request."""
    decoder.target.use_mode(decoder.mode)
    graph_runner = decoder.target.graph_runner
    decoder.target.use_mode("eager")
    assert graph_runner is not None
    return graph_runner


@pytest.mark.parametrize("kind", ["independent", *KINDS])
def test_tokens_and_counts_are_those_of_eager_forwards(pair: Pair, prompts: dict[str, Inputs], kind: str) -> None:
    """One decoder after the other, on the same models and caches; greedy, and sampled."""
    for tree in TREES:
        eager, fixed = decoders(pair, kind, tree, "fixed", capture_sizes=(1, 3, 8, 16, 64))
        for settings in ({}, {"temperature": 1.0, "seed": 4}):
            for inputs in prompts.values():
                expected = eager.generate(**inputs, max_new_tokens=24, **settings)
                assert eager.target.graph_runner is None
                found = fixed.generate(**inputs, max_new_tokens=24, **settings)
                assert torch.equal(found.sequences, expected.sequences)
                assert found.stats.accepted_lengths == expected.stats.accepted_lengths
                # Without the host in the loop eagle2 does not end when it could.
                assert found.stats.draft_forwards >= expected.stats.draft_forwards
                assert tree["policy"] == "eagle2" or found.stats.draft_forwards == expected.stats.draft_forwards


def test_an_answer_grows_past_its_extent(text_pair: Pair) -> None:
    """And past the capacity of the request before, whose forwards were prepared for another cache."""
    eager, fixed = decoders(text_pair, "independent", TREES[1], "fixed")
    for length, num_tokens in ((10, 4), (KV_LENGTH_STEP - 6, 24), (900, 200)):
        inputs = {"input_ids": torch.arange(length)[None] % 40 + 5}
        expected = eager.generate(**inputs, max_new_tokens=num_tokens)
        found = fixed.generate(**inputs, max_new_tokens=num_tokens)
        assert torch.equal(found.sequences, expected.sequences)
        graph_runner = runner_of(fixed)
        extents = {size.padded_kv_length for size in graph_runner._made}
        assert max(extents) == padded_length(length + num_tokens)
        assert {size.tokens for size in graph_runner._made} <= set(DEFAULT_CAPTURE_SIZES)


def test_a_size_is_prepared_once(pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    """And its buffers stay where they are."""
    _, fixed = decoders(pair, "dream", TREES[1], "fixed", capture_sizes=(1, 16))
    fixed.generate(**prompts["text"], max_new_tokens=20)
    graph_runner = runner_of(fixed)
    assert {size.tokens for size in graph_runner._made} == {16}
    offsets = {size: made.inputs["numbers"].data_ptr() for size, made in graph_runner._made.items()}
    monkeypatch.setattr(GraphRunner, "_prepare", None)
    fixed.generate(**prompts["text"], max_new_tokens=20)
    assert {size: made.inputs["numbers"].data_ptr() for size, made in graph_runner._made.items()} == offsets
    assert graph_runner.memory_bytes > 0


def test_what_a_forward_gives_outlives_the_buffers(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Plain steps tell the draft features of several forwards, one after the other, before it reads them."""
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["independent", "star"])
def test_compiled_forwards_decode_as_eager_ones(pair: Pair, prompts: dict[str, Inputs], kind: str) -> None:
    eager, compiled = decoders(pair, kind, TREES[1], "compile", capture_sizes=(1, 4, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerNotice)
        for name in ("text", "image"):
            expected = eager.generate(**prompts[name], max_new_tokens=24)
            found = compiled.generate(**prompts[name], max_new_tokens=24)
            assert torch.equal(found.sequences, expected.sequences)
            assert found.stats.accepted_lengths == expected.stats.accepted_lengths
    for model in (compiled.target, compiled.draft):
        model.use_mode("compile")
        assert model.graph_runner.why_eager is None
        model.use_mode("eager")


def test_every_size_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, and more of them than torch compiles of one function before it gives up in silence."""
    graphs, compiled = [], torch.compile

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend=count, **options))
    forwards = GraphRunner("compile", lambda inputs: (inputs["x"] * 2,), torch.device("cpu"), what="a doubling")
    sizes = range(1, torch._dynamo.config.recompile_limit + 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerNotice)
        for _ in range(2):
            for size in sizes:
                values = {"x": np.arange(size, dtype=np.float32)}
                (found,) = forwards.run(GraphKey(size, KV_LENGTH_STEP), values, torch.float32)
                assert found.tolist() == [2.0 * number for number in range(size)]
    assert len(graphs) == len(sizes)


def test_what_torch_gives_up_on_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a forward that torch compiles by itself, behind a break, has one code for all sizes."""

    @torch._dynamo.disable
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x

    def broken(inputs: Any) -> tuple[torch.Tensor, ...]:
        return (behind_the_break(opaque(inputs["x"])),)

    def behind_the_break(x: torch.Tensor) -> torch.Tensor:
        return opaque(x) * 2

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend="eager", **options))
    forwards = GraphRunner("compile", broken, torch.device("cpu"), what="a doubling")
    with pytest.warns(EagerNotice, match="a doubling cannot be prepared by runner compile"):
        for size in range(1, torch._dynamo.config.recompile_limit + 4):
            (found,) = forwards.run(
                GraphKey(size, KV_LENGTH_STEP), {"x": np.arange(size, dtype=np.float32)}, torch.float32
            )
            assert found.tolist() == [2.0 * number for number in range(size)]
    assert forwards.why_eager is not None


def test_what_cannot_be_prepared_runs_eagerly_and_says_why(
    pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr(torch, "compile", refuse)
    eager, decoder = decoders(pair, "dream", TREES[1], "compile")
    expected = eager.generate(**prompts["text"], max_new_tokens=20)
    with pytest.warns(
        EagerNotice, match=r"type llama cannot be prepared by runner compile \(RuntimeError: no C\+\+ compiler\)"
    ):
        found = decoder.generate(**prompts["text"], max_new_tokens=20)
    assert torch.equal(found.sequences, expected.sequences)
    assert runner_of(decoder).why_eager == "RuntimeError: no C++ compiler"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("cuda-graph", "runner graph needs a CUDA device; the model is on cpu"),
        ("jit", "runner must be eager, fixed, compile, graph; got 'jit'"),
    ],
)
def test_a_runner_that_is_none_here_is_refused(pair: Pair, mode: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Decoder(pair.target, pair.draft, mode=mode)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_masks_of_an_extent_show_what_masks_of_a_cache_show(window: int | None) -> None:
    """The mask buffer's, from its first visible column on; everything else is closed."""
    rng = np.random.default_rng(window or 0)
    windows = {"layers": window}
    buffer = MaskBuffer(windows, 200, dtype=torch.float32, device=torch.device("cpu"))
    for _ in range(60):
        prefix, num_columns = int(rng.integers(0, 90)), int(rng.integers(1, 30))
        rows = np.sort(rng.choice(num_columns, int(rng.integers(1, num_columns + 1)), replace=False))
        offsets = np.sort(rng.integers(0, 12, num_columns))
        is_open = rng.random((len(rows), num_columns)) < 0.5
        tree_mask = np.where(is_open, np.float32(0), np.float32(buffer.mask_value))
        expected = buffer.write(tree_mask, prefix, offsets[rows], offsets)
        assert isinstance(expected, torch.Tensor)
        found = padded_masks(
            windows,
            tree_mask,
            prefix,
            offsets[rows],
            offsets,
            padded_kv_length=KV_LENGTH_STEP,
            mask_value=buffer.mask_value,
        )
        mask = found["layers"]
        assert mask.shape == (1, 1, len(rows), KV_LENGTH_STEP)
        is_narrow = window is not None and prefix + int(offsets[rows].max()) >= window
        first = first_visible(prefix, window) if is_narrow else 0
        assert np.array_equal(mask[..., first : prefix + num_columns], expected.numpy())
        assert (mask[..., :first] == buffer.mask_value).all()
        assert (mask[..., prefix + num_columns :] == buffer.mask_value).all()
        step = DeviceStep(
            prefix_state=torch.tensor([prefix]),
            tokens=torch.zeros(len(rows), dtype=torch.long),
            offsets=torch.from_numpy(offsets[rows]),
            tree_mask=torch.from_numpy(tree_mask),
            column_offsets=torch.from_numpy(offsets),
            padded_kv_length=KV_LENGTH_STEP,
        )
        on_device = step.masks(windows, mask_value=buffer.mask_value)
        assert np.array_equal(on_device["layers"].numpy(), mask)


# ------------------------------------------------------------------------------------------------------- CUDA graphs


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["independent", *KINDS])
def test_graphs_decode_as_eager_forwards(pair: Pair, prompts: dict[str, Inputs], kind: str) -> None:
    """Memory does not grow with what is decoded."""
    on_device = replace(pair, target=deepcopy(pair.target).to("cuda"), draft=deepcopy(pair.draft).to("cuda"))
    eager, graphs = decoders(on_device, kind, TREES[1], "cuda-graph")
    inputs = {name: {k: v.to("cuda") for k, v in one.items()} for name, one in prompts.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerNotice)
        for one in inputs.values():
            expected = eager.generate(**one, max_new_tokens=32)
            found = graphs.generate(**one, max_new_tokens=32)
            assert torch.equal(found.sequences, expected.sequences)
            assert found.stats.accepted_lengths == expected.stats.accepted_lengths
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        graphs.generate(**inputs["text"], max_new_tokens=500)
    assert torch.cuda.memory_allocated() == before


@gpu
@pytest.mark.gpu
def test_a_replayed_forward_is_the_captured_one() -> None:
    calls = []

    def function(inputs: Any) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return (inputs["x"] * 2,)

    forwards = GraphRunner("cuda-graph", function, torch.device("cuda"), what="a doubling")
    for number in range(5):
        (found,) = forwards.run(GraphKey(3, 256), {"x": np.full(3, number, np.float32)}, torch.float32)
        assert found.tolist() == [2.0 * number] * 3
    assert len(calls) == 3, "two warm-ups, and the capture"
