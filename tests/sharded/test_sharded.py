"""Targets that several processes hold together decode as one process does."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from autotune.cli import main
from autotune.documents.fingerprint import Fingerprint
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.evaluation.divergence import first_divergence
from autotune.machine.device import fingerprint
from autotune.modeling.loading import BUNDLED_TARGET, RETRIEVAL, SHARD_DRAFT, reference
from autotune.modeling.ranks import join_ranks
from autotune.modeling.sharded import load_target
from autotune.runtime.decoder import Decoder
from autotune.runtime.load import load
from tests.families import FAMILIES, Family
from tests.runtime.test_families import TREES
from tests.sample_documents import decoding_profile
from tests.sharded import processes
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
    """For every policy, at both temperatures, with text and images; one broadcast a step, two for a prompt. A profile
    that they tune names so many devices, and one process decodes by it.
    """
    family, number, num_requests = CASES[case]
    save_family(family, tmp_path)
    requests = requests_of(family, tmp_path, TREES, num_requests)
    alone = replies(load_target(str(tmp_path / "target")), tmp_path, requests)
    together = replies_of_ranks(number, tmp_path, requests)
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
    assert [reply.forwards for reply in together] == [reply.forwards for reply in alone], "the draft kept other tokens"
    assert {reply.broadcasts - reply.forwards for reply in together} == {2}
    device = Fingerprint.model_validate_json((tmp_path / "device").read_text())
    assert device.name == f"{number}xcpu" and device.model == fingerprint("cpu").shared_by(number).model
    models = (reference(str(tmp_path / part)) for part in ("target", "draft"))
    with pytest.warns(UserWarning, match=f"tuned on cpu/{number}x.*, this is cpu/"):
        load(decoding_profile(*models, hardware=device))
    steps = sum(reply.forwards for reply in together)
    print(f"{steps / len(together):.1f} steps a request, {sum(r.num_bytes for r in together) / steps:.0f} bytes a step")


@pytest.mark.parametrize(
    ("number", "family", "num_requests"),
    [
        (2, with_heads("llama", 4, 2), 2 * len(TREES)),
        pytest.param(3, with_heads("llama", 6, 3), 200, marks=pytest.mark.nightly),
        pytest.param(2, with_heads("qwen2_5_vl", 4, 2), 200, marks=pytest.mark.nightly),
        pytest.param(2, with_heads("mistral_window", 4, 2), 200, marks=pytest.mark.nightly),
    ],
    ids=["llama", "llama of three", "images", "windows"],
)
def test_tokens_are_the_same_with_a_divided_draft(
    tmp_path: Path, number: int, family: Family, num_requests: int
) -> None:
    """For every policy, at both temperatures. The other processes run what the draft evaluates: its prompt too takes
    two broadcasts, and each of its steps one.
    """
    save_family(family, tmp_path)
    requests = requests_of(family, tmp_path, TREES, num_requests)
    alone = replies(load_target(str(tmp_path / "target")), tmp_path, requests)
    together = replies_of_ranks(number, tmp_path, requests, with_shards_of_draft=True)
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
    assert [reply.forwards for reply in together] == [reply.forwards for reply in alone], "the draft kept other tokens"
    steps = [reply.forwards + reply.draft_forwards for reply in alone]
    prompts = [4 if count > 0 else 2 for count in steps]  # an answer of one token needs no draft
    assert [reply.broadcasts for reply in together] == np.add(prompts, steps).tolist()


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
    [(3, (4, 2), "3 processes do not divide its query heads and its key"), (2, (3, 1), "value heads; start 1 of them")],
)
def test_heads_that_do_not_divide_are_refused(tmp_path: Path, number: int, heads: tuple[int, int], rule: str) -> None:
    family = with_heads("llama", *heads)
    save_family(family, tmp_path)
    assert rule in replies_of_ranks(number, tmp_path, [])


def test_a_draft_whose_heads_do_not_divide_is_refused(tmp_path: Path) -> None:
    save_family(FAMILIES["llama"], tmp_path)
    save_family(with_heads("llama", 3, 1), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "draft", tmp_path / "draft", dirs_exist_ok=True)
    error = replies_of_ranks(2, tmp_path, [], with_shards_of_draft=True)
    assert re.search(r"draft: 2 processes do not divide its query heads .* a draft without --shard-draft", error)


def test_a_draft_that_cannot_be_divided_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft without a model of its own, one that reads the target's features, and any without torchrun."""
    target = load_target(BUNDLED_TARGET)
    monkeypatch.setenv(SHARD_DRAFT, "True")
    for draft in (RETRIEVAL, "digits/star"):
        with pytest.raises(
            UserError, match=rf"{draft}: --shard-draft divides independent drafts, and this one is of kind"
        ):
            load_draft(draft, target)
    with pytest.raises(
        UserError, match="--shard-draft divides a draft among the processes of torchrun; start the command"
    ):
        load_target(BUNDLED_TARGET)


@pytest.mark.parametrize(
    ("work", "rule"),
    [
        (processes.other_version, r"the processes of torchrun have different versions of autotune \(.*\); give every"),
        (processes.failing_follower, "process 1: RuntimeError: the memory is full"),
        (processes.killed_follower, "another process of torchrun has ended; run the same command again"),
    ],
)
def test_one_line_says_why_the_processes_end(tmp_path: Path, work: Callable[[Path], None], rule: str) -> None:
    save_family(FAMILIES["llama"], tmp_path)
    started = processes.start(2, work, tmp_path)
    for process in started:
        process.join(timeout=120)
        assert not process.is_alive()
    (line,) = (tmp_path / "error").read_text().splitlines()
    assert re.match(rf"autotune: {rule}", line)


@pytest.mark.parametrize(
    ("environment", "rule"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2, and LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "each process needs a GPU of its own; got 2 processes for 1 GPUs",
        ),
    ],
)
def test_a_wrong_start_is_refused(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], rule: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=rule):
        join_ranks()


def test_one_process_of_torchrun_is_an_ordinary_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    joins: list[None] = []
    monkeypatch.setattr(main, "_join_ranks", lambda: joins.append(None))
    for size, expected in (("1", 0), ("2", 1)):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(SystemExit):
            main.main(["run", "--help"])
        assert len(joins) == expected
