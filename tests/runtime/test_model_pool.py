"""The models of a search: drafts that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.machine.worker_pool import MAX_WORKERS
from autotune.runtime.model_pool import ModelPool
from tests.tiny_models import Pair


class Lines:
    """A console that keeps its lines."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_default_draft_that_does_not_fit_is_left_out_and_a_named_one_refused(text_pair: Pair, tmp_path: Path) -> None:
    """A target without a head, a head whose weights are damaged, and one without weights."""
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"draft_vocab_size": 32, "hidden_size": 64}')
    (tmp_path / "head" / "model.safetensors").write_bytes(b"no weights")
    target = str(text_pair.target_folder)
    drafts = (
        f"{target}:mtp",
        str(tmp_path / "head"),
        str(tmp_path / "nowhere"),
        str(text_pair.draft_folder),
        "retrieval",
    )
    console = Lines()
    pool = ModelPool(target, drafts, "cpu", console=console, leaves_out=True)  # type: ignore[arg-type]
    assert tuple(pool.references) == pool.arguments[1] == drafts[3:]
    assert len(console.said) == 3
    assert all(f"left out   {name}" in line for name, line in zip(drafts[:3], console.said, strict=True))
    assert all("\n" not in line for line in console.said)
    for name in drafts[:3]:
        with pytest.raises(UserError):
            ModelPool(target, (name, "retrieval"), "cpu")


@pytest.mark.parametrize(
    ("num_cores", "memory", "jobs", "limits"),
    [
        (8, 1 << 50, None, (7, 1)),
        (8, 1 << 50, 2, (1, 4)),
        (8, 1 << 50, 1, (0, 8)),
        (64, 1 << 50, None, (MAX_WORKERS, 8)),
        (64, 1 << 31, None, (0, 64)),  # half of 2 GiB is too little for a worker
    ],
)
def test_workers_share_cores_and_memory(
    text_pair: Pair, monkeypatch: pytest.MonkeyPatch, num_cores: int, memory: int, jobs: int | None, limits: Any
) -> None:
    pool = ModelPool(str(text_pair.target_folder), (), "cpu")
    monkeypatch.setattr(pool, "num_cores", num_cores)
    monkeypatch.setattr("autotune.runtime.model_pool.free_memory", lambda device: memory)
    assert pool.worker_limits(jobs) == limits
