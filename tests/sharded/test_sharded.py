"""Targets that several processes hold together decode as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotune.evaluation.divergence import first_divergence
from autotune.modeling.sharded import load_target
from autotune.runtime.decoder import Decoder
from tests.families import FAMILIES
from tests.runtime.test_families import TREES
from tests.sharded.processes import replies, replies_of_ranks, requests_of, save_family, with_heads

CASES = {
    "text": (FAMILIES["llama"], 2, 2 * len(TREES)),
    "image": (FAMILIES["llava_onevision"], 2, 4 * len(TREES)),
    "200 llama": (FAMILIES["llama"], 2, 200),
    "200 onevision": (FAMILIES["llava_onevision"], 2, 200),
    "200 qwen": (with_heads("qwen2_5_vl", 4, 2), 2, 200),
    "200 qwen of three": (with_heads("qwen2_5_vl", 6, 3), 3, 200),
}
"""Family, processes and requests."""


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.nightly] * ("200" in name)) for name in CASES])
def test_tokens_are_those_of_one_process(tmp_path: Path, case: str) -> None:
    """For every policy, at both temperatures, with text and images; one broadcast a step, and two for a prompt."""
    family, number, num_requests = CASES[case]
    save_family(family, tmp_path)
    requests = requests_of(family, tmp_path, TREES, num_requests)
    alone = replies(load_target(str(tmp_path / "target")), tmp_path, requests)
    together = replies_of_ranks(number, tmp_path, requests)
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
    assert {reply.broadcasts - reply.forwards for reply in together} == {2}
    steps = sum(reply.forwards for reply in together)
    print(f"{steps / len(together):.1f} steps a request, {sum(r.num_bytes for r in together) / steps:.0f} bytes a step")


def test_near_ties_alone_differ_in_float32(tmp_path: Path) -> None:
    """By the rule of ``check``."""
    family = FAMILIES["llava_onevision"]
    save_family(family, tmp_path, torch.float32)
    requests = requests_of(family, tmp_path, TREES, 28)
    target = load_target(str(tmp_path / "target"))
    for request, one, many in zip(
        requests, replies(target, tmp_path, requests), replies_of_ranks(2, tmp_path, requests), strict=True
    ):
        sampler = Decoder(target).sampler(**request.inputs, temperature=request.temperature, seed=5)
        divergence = first_divergence(target, request.inputs, one.tokens, many.tokens, sampler)
        assert divergence is None or divergence.is_near_tie


@pytest.mark.parametrize(
    ("number", "heads", "rule"),
    [(3, (4, 2), "3 processes do not divide its 2 attention heads; start 2 of them"), (2, (3, 1), "start one of them")],
)
def test_heads_that_do_not_divide_are_refused(tmp_path: Path, number: int, heads: tuple[int, int], rule: str) -> None:
    family = with_heads("llama", *heads)
    save_family(family, tmp_path)
    assert rule in replies_of_ranks(number, tmp_path, [])
