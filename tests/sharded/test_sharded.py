"""Targets that several processes hold together decode as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotune.modeling.sharded import load_target
from tests.families import FAMILIES
from tests.runtime.test_families import TREES
from tests.sharded.processes import Reply, replies, replies_of_ranks, requests_of, save_family


def both(name: str, folder: Path, number: int, num_requests: int) -> tuple[list[Reply], list[Reply]]:
    """Replies of one process and of several ones to the same requests, in float64."""
    save_family(name, folder)
    requests = requests_of(FAMILIES[name], folder, TREES, num_requests)
    return replies(load_target(str(folder / "target")), folder, requests), replies_of_ranks(number, folder, requests)


@pytest.mark.parametrize(
    ("name", "number", "num_requests"),
    [
        pytest.param("llama", 2, 2 * len(TREES), id="text"),
        pytest.param("llava_onevision", 2, 4 * len(TREES), id="image"),
        pytest.param("qwen2_5_vl", 2, 200, id="qwen", marks=pytest.mark.nightly),
        pytest.param("llava_onevision", 2, 200, id="onevision", marks=pytest.mark.nightly),
        pytest.param("llama", 2, 200, id="llama", marks=pytest.mark.nightly),
        pytest.param("smolvlm", 3, 200, id="three", marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_those_of_one_process(tmp_path: Path, name: str, number: int, num_requests: int) -> None:
    """For every policy, at both temperatures, with text and images; one broadcast a step, and two for a prompt."""
    alone, together = both(name, tmp_path, number, num_requests)
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
    for reply in together:
        assert reply.broadcasts - reply.forwards in (2, 4), "the buffers grow with the first long prompt or tree"
    assert torch.tensor([reply.forwards for reply in together]).sum() > num_requests
