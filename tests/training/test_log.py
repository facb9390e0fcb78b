"""The messages of a run: memory and progress."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune import console
from autotune.drafters.star import StarNetwork
from autotune.training.trainer import train, train_with_progress
from tests.obvious import refused
from tests.training.conftest import STAGE

OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError("Unable to allocate 9 GiB"),
)


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_batch_that_does_not_fit_is_refused_before_training(
    error: Exception, recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, on the examples of the longest batch."""

    def loss(self: StarNetwork, batch: Any, *_: Any) -> Any:
        raise error

    monkeypatch.setattr(StarNetwork, "loss", loss)
    path = recipe()
    message = (
        r"recipe\.yaml: the memory of cpu must hold a step on 2 examples of up to \d+ tokens; it is full \(.*\); "
        r"lower batch_size \(a process reads 2 at a time\), or shorten the longest examples$"
    )
    with refused(message):
        train(path, output=path.parent / "out")
    assert not (path.parent / "out").exists()


def test_another_error_of_a_step_is_no_lack_of_memory(
    recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(StarNetwork, "loss", loss)
    with pytest.raises(RuntimeError, match="illegal"):
        train(recipe())


def test_plain_lines_show_the_time_left(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A run that continues from step 200 at two minutes per step prints lines regularly."""
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.Console().stage("star") as update:
        for step in range(200, 401):
            update(step, 400, "loss 0.500")
            now += 120.0
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert "star: 300/400 (200 min left) loss 0.500" in lines
    assert len(lines) > 30 and not any("400/400" in line for line in lines)


def test_progress_shows_loss_and_agreement(recipe: Callable[..., Path], tmp_path: Path, capsys: Any) -> None:
    path = recipe(stages=[{**STAGE, "steps": 4, "subnets": "random"}] * 2)
    train_with_progress(path, None, console.Console())
    text = capsys.readouterr().err.strip()
    assert re.search(
        r"^memory on cpu: a step on 2 examples of up to \d+ tokens takes .*iB, models included; .* are free", text, re.M
    )
    assert re.search(r"tests/star stage 1/2: 2/4 loss \d+\.\d{3}, agreement \d\.\d{3}$", text, re.M)
    assert re.search(r"tests/star stage 2/2: 2/4 loss \d+\.\d{3}", text, re.M)
    assert text.splitlines()[-1] == f"weights and training log written to {tmp_path}"
    assert {"config.json", "model.safetensors", "training.jsonl"} <= {file.name for file in tmp_path.iterdir()}
