"""Captures that are made ahead serve requests without further captures, and memory does not grow from request to
request.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.drafters.checkpoint import load_draft
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import as_draft
from autotune.trees.fallback import RoundPrice
from tests.drafters.test_eagle3 import write_head
from tests.drafters.test_feature_draft import agreeing_draft
from tests.rehearsal import Rehearsal
from tests.tiny_models import Inputs, Pair, inputs_on, on_device

DEVICE = "cuda:0"
EAGLE2: dict[str, Any] = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 7}
SAGE: dict[str, Any] = {"policy": "sage", "n_max": 7, "d_max": 3}
FEW_SIZES = (1, 8)


def text_of(num_tokens: int) -> Inputs:
    return {"input_ids": (torch.arange(num_tokens)[None] % 40 + 5).to(DEVICE)}


def text_decoder(pair: Pair, tree: dict[str, Any], **options: Any) -> Decoder:
    return Decoder(pair.target, pair.draft, tree=tree, capture_sizes=FEW_SIZES, **options)


@pytest.mark.parametrize(
    ("kind", "tree"),
    [("independent", EAGLE2), pytest.param("dream", EAGLE2, marks=pytest.mark.nightly), ("dream", SAGE)],
)
def test_prepared_requests_capture_nothing(
    rehearsal: Rehearsal, pair: Pair, prompts: dict[str, Inputs], kind: str, tree: dict[str, Any]
) -> None:
    """With pruned visual tokens and without."""
    pair = on_device(pair, DEVICE)
    target = Target(pair.target)
    draft = as_draft(pair.draft) if kind == "independent" else agreeing_draft(kind, target, injection_layer=4)
    decoder = Decoder(target, draft, tree=tree, visual_keep=0.5, capture_sizes=FEW_SIZES, mode="cuda-graph")
    reports: list[tuple[int, int]] = []
    done = decoder.prepare(240, report=lambda number, total: reports.append((number, total)))
    assert done.num_captures == rehearsal.counts.captures > 0
    assert done.memory_bytes == graph_memory(target.device).memory_bytes > 0
    assert [number for number, _ in reports] == list(range(1, reports[-1][1] + 1))
    captures = rehearsal.counts.captures
    expected = Decoder(target, draft, tree=tree, visual_keep=0.5, mode="eager")
    for name in ("text", "image"):
        inputs = inputs_on(prompts[name], DEVICE)
        found = decoder.generate(**inputs, max_new_tokens=8).sequences
        assert torch.equal(found.cpu(), expected.generate(**inputs, max_new_tokens=8).sequences.cpu())
    assert decoder.prepare(240).num_captures == 0, "it keeps what is there"
    assert rehearsal.counts.captures == captures


@pytest.mark.parametrize("kind", ["independent", "dream"])
def test_plain_stretches_of_prepared_requests_capture_nothing(rehearsal: Rehearsal, pair: Pair, kind: str) -> None:
    """After them the draft reads its pending tokens in pieces of one size."""
    pair = on_device(pair, DEVICE)
    target = Target(pair.target)
    draft = as_draft(pair.draft) if kind == "independent" else agreeing_draft(kind, target, injection_layer=4)
    price = RoundPrice(round_steps=4.5, level_steps=0.0, node_steps=0.0)
    decoder = Decoder(target, draft, tree={"policy": "chain", "depth": 2}, fallback=price)
    decoder.prepare(200)
    sizes = {key.layout.num_tokens for key in decoder.draft._graph_runners["cuda-graph"]._captured}  # type: ignore[union-attr]
    assert sizes == ({1, 2, 32} if kind == "independent" else {1, 2, 4, 8, 32})
    before = rehearsal.counts.captures
    stats = [decoder.generate(**text_of(10), max_new_tokens=num_tokens).stats for num_tokens in (60, 5)]
    assert stats[0].plain_steps > 25 and all(one.draft_forwards > 0 for one in stats)
    assert rehearsal.counts.captures == before


def test_a_sampled_request_and_plain_decoding_are_prepared_too(rehearsal: Rehearsal, text_pair: Pair) -> None:
    pair = on_device(text_pair, DEVICE)
    for decoder, settings in (
        (text_decoder(pair, EAGLE2), {"temperature": 0.8, "top_k": 20}),
        (Decoder(pair.target, capture_sizes=FEW_SIZES), {}),
    ):
        assert decoder.prepare(200).num_captures > 0
        before = rehearsal.counts.captures
        decoder.generate(**text_of(20), max_new_tokens=8, **settings)
        assert rehearsal.counts.captures == before


def test_three_position_axes_are_prepared_too(rehearsal: Rehearsal, qwens: Any, tmp_path: Path) -> None:
    model, inputs = qwens["qwen2_5_vl"]
    expected = Decoder(model).generate(**inputs, max_new_tokens=12).sequences
    target = Target(deepcopy(model).to(DEVICE))
    head = load_draft(str(write_head(tmp_path / "head", "SpecForge/qwen2-5-vl-7b", target)), target)
    for draft in (as_draft(target.model), head):
        decoder = Decoder(target, draft, tree=EAGLE2, visual_keep=0.5, capture_sizes=FEW_SIZES)
        assert decoder.prepare(inputs["input_ids"].shape[1] + 40).num_captures > 0
        captures = rehearsal.counts.captures
        found = decoder.generate(**inputs_on(inputs, DEVICE), max_new_tokens=12).sequences
        assert torch.equal(found.cpu(), expected) and rehearsal.counts.captures == captures


def test_other_modes_prepare_nothing(text_pair: Pair) -> None:
    assert text_decoder(text_pair, EAGLE2).prepare(200) == (0, 0)


def test_memory_does_not_grow_over_requests_of_growing_length(rehearsal: Rehearsal, text_pair: Pair) -> None:
    decoder = text_decoder(on_device(text_pair, DEVICE), EAGLE2)
    decoder.prepare(600)
    list(decoder.stream(**text_of(10), max_new_tokens=4))
    live, captures = rehearsal.live_bytes, rehearsal.counts.captures
    for length in range(12, 12 + 12 * 45, 45):
        list(decoder.stream(**text_of(length), max_new_tokens=2))
        assert rehearsal.live_bytes == live, length
    assert rehearsal.counts.captures == captures


def test_a_longer_request_frees_the_former_cache_and_captures(rehearsal: Rehearsal, text_pair: Pair) -> None:
    """As much is left as after a first request of that length."""
    pair = on_device(text_pair, DEVICE)
    weights = rehearsal.live_bytes

    def left_by(*lengths: int) -> int:
        decoder = text_decoder(pair, EAGLE2)
        for length in lengths:
            list(decoder.stream(**text_of(length), max_new_tokens=4))
        return rehearsal.live_bytes - weights

    longest = left_by(1300)
    assert rehearsal.live_bytes == weights, "a decoder that is dropped leaves nothing"
    assert left_by(10, 700, 1300) == longest


def test_memory_does_not_grow_over_policies(rehearsal: Rehearsal, text_pair: Pair) -> None:
    first = text_decoder(on_device(text_pair, DEVICE), EAGLE2)

    def live_after(tree: dict[str, Any]) -> int:
        decoder = Decoder(first.target, first.draft, tree=tree, capture_sizes=FEW_SIZES)
        list(decoder.stream(**text_of(10), max_new_tokens=2))
        return rehearsal.live_bytes

    live_after({"policy": "chain", "depth": 2})  # steps with one proposal have captures of their own
    before = live_after(EAGLE2)
    for number in range(8):
        live_after(
            {**EAGLE2, "depth": 2, "budget": 4 + number}
            if number % 2
            else {"policy": "chain", "depth": 1 + number // 6}
        )
    assert live_after(EAGLE2) == before
