"""The tiny target as teacher of drafts, and recipes for it. Models are imported by the fixture that needs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from PIL import Image

from autotune.console import Console, Update

if TYPE_CHECKING:
    from autotune.modeling.prompt import EncodedPrompt
    from autotune.modeling.target import Target
    from tests.tiny_models import Inputs, Pair

SIZES = {"num_heads": 4, "head_size": 8, "mlp_size": 32}
STAGE = {"steps": 2, "batch_size": 2, "learning_rate": 1e-3}


class Killed(Exception):
    """Ends a run in the middle."""


class Said(Console):
    """A console that keeps what it is told, and ends a run after some steps."""

    def __init__(self, killed_after: int | None = None) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.steps: list[tuple[str, int, str]] = []
        self.killed_after = killed_after

    def say(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Update]:
        def update(done: int, total: int, note: str = "") -> None:
            self.steps += [(name, done, note)] if " stage " in name else []
            if self.killed_after is not None and len(self.steps) > self.killed_after:
                raise Killed

        yield update


@pytest.fixture(scope="module")
def target(pair: Pair) -> Target:
    from autotune.modeling.target import Target

    return Target(pair.target)


@pytest.fixture(scope="module")
def encoded(target: Target, prompts: dict[str, Inputs]) -> list[EncodedPrompt]:
    """Three prompts of different lengths: one is text only, two have an image."""
    import torch

    with torch.no_grad():
        return [target.encode(inputs).prompts[0] for inputs in prompts.values()]


@pytest.fixture
def recipe(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a recipe for the tiny target beside its examples, in a new working folder, where answers and teacher
    batches are cached. Unless changed, it has seven steps of a star draft.
    """
    monkeypatch.chdir(tmp_path)
    write_examples(tmp_path / "examples.jsonl")

    def write(**changes: Any) -> Path:
        return write_recipe(tmp_path / "recipe.yaml", **{"teacher": str(pair.target_folder), **changes})

    return write


def write_recipe(path: Path, teacher: str | None, **changes: Any) -> Path:
    stage = {**STAGE, "warmup_steps": 2}
    recipe = {
        "schema": "autotune.recipe/1",
        "name": "tests/star",
        "description": "a small draft",
        "model": "star",
        "teacher": teacher,
        "draft": SIZES,
        "data": {"file": "examples.jsonl"},
        "seed": 1,
        "stages": [
            {**stage, "steps": 3, "distillation": "entropy-and-change"},
            {**stage, "steps": 4, "subnets": "random", "optimizer": "muon"},
        ],
        **changes,
    }
    path.write_text(
        yaml.safe_dump(json.loads(json.dumps({key: value for key, value in recipe.items() if value is not None})))
    )
    return path


def write_examples(path: Path) -> None:
    """Seven examples, with and without images and answers."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(path.parent / "image.png")
    lines = []
    for number in range(7):
        line: dict[str, Any] = {"prompt": "Count to " + "ten, then to " * number + "two.", "max_new_tokens": 9}
        if number % 2:
            line["images"] = ["image.png"]
        if number % 3 == 0:
            line["answer"] = " Row 1 reads 3, 1, 4." * (1 + number)
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
