"""The training log, and the messages of a run: memory, progress and expected agreement."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune import console
from autotune.drafters.star import StarNetwork
from autotune.files import data_root
from autotune.training.log import EXPECTATION_ERRORS, expected_agreement, logged
from autotune.training.recipe import Recipe
from autotune.training.trainer import train, train_with_progress
from tests.obvious import refused
from tests.training.conftest import STAGE


def write_log(path: Path, steps: list[tuple[int, int]]) -> Path:
    lines = [
        {
            "stage": stage,
            "step": step,
            "loss": 2.0 / (1 + number),
            "agreement": 0.5,
            **({"held_out_agreement": 0.4, "held_out_own_agreement": 0.3, "held_out_loss": 1.0} if step % 2 else {}),
        }
        for number, (stage, step) in enumerate(steps)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"stage": 1, "st')
    return path


def test_repeated_steps_of_a_killed_run_count_once(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.jsonl", [(0, 1), (0, 2), (0, 3), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2), (1, 1)])
    assert [(r["stage"], r["step"]) for r in logged(log)] == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1)]
    assert [r["loss"] for r in logged(log)] == [2.0 / (1 + number) for number in (0, 3, 4, 5, 8)]


def test_the_expected_agreement_errs_as_is_said(tmp_path: Path) -> None:
    """On every bundled log, at the first evaluation after a quarter and after half of the steps: by at most the error
    that is told, which one of them comes close to.
    """
    errors: dict[float, list[float]] = {}
    for log in data_root().glob("drafts/*/*/training.jsonl"):
        if not (log.parent / "recipe.yaml").exists():
            continue
        stages = [stage.steps for stage in Recipe.load(log.parent / "recipe.yaml").stages]
        records = [record for record in logged(log) if "held_out_agreement" in record]
        first = set()
        for number in range(1, len(records)):
            (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:number]))
            found = expected_agreement(tmp_path / "log.jsonl", stages)
            if found is not None and found[1] not in first:
                first.add(found[1])
                errors.setdefault(found[1], []).append(abs(found[0] - records[-1]["held_out_agreement"]))
    assert {told: len(made) >= 4 for told, made in errors.items()} == {error: True for _, error in EXPECTATION_ERRORS}
    for told, made in errors.items():
        assert told / 3 < max(made) <= told, (told, made)
    assert expected_agreement(tmp_path / "none.jsonl", [100]) is None


@pytest.mark.parametrize(
    ("held_out", "least", "most"),
    [([0.79, 0.94], 0.95, 0.99), ([0.0, 0.0], 0.0, 0.01), ([1.0, 1.0], 0.99, 1.0), ([0.6, 0.2], 0.02, 0.1)],
)
def test_the_expected_agreement_is_a_share(held_out: list[float], least: float, most: float, tmp_path: Path) -> None:
    """After a fast start, which a straight line continues to 109 %, and after none."""
    records = [{"stage": 0, "step": 100 * n, "held_out_agreement": found} for n, found in enumerate(held_out, start=1)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = expected_agreement(tmp_path / "log.jsonl", [400])
    assert found is not None and least <= found[0] <= most


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError("Unable to allocate 9 GiB"),
)


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_batch_that_does_not_fit_is_refused_before_training(
    error: Exception, recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first examples if time is announced, otherwise before the first step, on those of the longest batch."""
    longest: list[int] = []

    def loss(self: StarNetwork, batch: Any, *_: Any) -> Any:
        longest.append(batch.embeddings.shape[1])
        raise error

    monkeypatch.setattr(StarNetwork, "loss", loss)
    path = recipe()
    message = (
        r"recipe\.yaml: the memory of cpu must hold a step on 2 examples of up to \d+ tokens; it is full \(.*\); "
        r"lower batch_size \(a process reads 2 at a time\), or shorten the longest examples$"
    )
    for notify in (None, [].append):
        with refused(message):
            train(path, output=path.parent / "out", notify=notify)
    assert not (path.parent / "out").exists() and longest[0] >= longest[1]


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


def test_progress_shows_loss_and_agreement(recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = recipe(stages=[{**STAGE, "steps": 4, "subnets": "random"}] * 2)
    messages: list[str] = []
    plain = SimpleNamespace(_rich=None, say=messages.append, stage=console.Console.stage)
    plain.stage = lambda name: console.Console.stage(plain, name)  # type: ignore[arg-type]
    train_with_progress(path, None, plain)  # type: ignore[arg-type]
    text = "\n".join(messages)
    assert re.search(
        r"^memory on cpu: a step on 2 examples of up to \d+ tokens takes .*iB, models included; .* are free", text, re.M
    )
    assert re.search(r"tests/star stage 1/2: 2/4 loss \d+\.\d{3}, agreement \d\.\d{3}$", text, re.M)
    assert re.search(r"tests/star stage 2/2: 2/4 loss \d+\.\d{3}", text, re.M)
    assert messages[-1] == f"weights and training log written to {tmp_path}"
    assert {"config.json", "model.safetensors", "training.jsonl"} <= {file.name for file in tmp_path.iterdir()}
