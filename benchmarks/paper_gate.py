"""Measures what the falling entropy bonus of SpecVLM's gate does, against a constant one: how sure the gate is, and the
loss of its choice.

Trains the bundled draft ``digits/specvlm`` further from its weights by its recipe, in one stage of ``--steps``: once
with the bonus that falls to zero, and once with the constant one on the same batches. Then measures each as
``draft_cards.py operators`` does, and prints for every task the mean gap between the gate's two best shares, and by how
much the loss of the gate's choice, of always ``resample`` and of no visual row at all exceeds that of the best single
operator, in per cent.

Takes about 10 minutes on one core. A run that was stopped continues from its last hundred steps.

    python -m drafts.digits.make examples --train 1600
    python benchmarks/paper_gate.py [--steps 200]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import click
import torch
from accelerate import Accelerator

from autotune.console import Console
from autotune.drafters.checkpoint import load_network
from autotune.files import content_key, data_root, read_lines
from autotune.training.draft_task import DraftTask, autocast_dtype
from autotune.training.recipe import Recipe, Stage
from autotune.training.trainer import Checkpoint, Trainer
from benchmarks.draft_cards import OPERATOR_ROWS, operators

DRAFT = data_root() / "drafts" / "digits" / "specvlm"


class ConstantBonus(Stage):
    """A stage whose settings are those of its first step at every step."""

    def at(self, share: float) -> Self:
        return self


class FurtherTraining(DraftTask):
    """Training that begins with the bundled weights."""

    def prepare(self) -> None:
        self.module.load_state_dict(load_network(DRAFT).state_dict())


def train_further(stage: Stage, folder: Path) -> None:
    """Train the bundled draft for one stage more, and write it to ``folder``."""
    path = DRAFT / "recipe.yaml"
    recipe = Recipe.load(path)
    data = recipe.data.model_copy(update={"num_examples": stage.steps * stage.batch_size})
    recipe = recipe.model_copy(update={"data": data, "stages": [stage]})
    accelerator = Accelerator()
    torch.manual_seed(recipe.seed)
    task = FurtherTraining(recipe, path, accelerator)
    checkpoint = Checkpoint(folder / ".checkpoint" / "state.safetensors", content_key(recipe.model_dump(mode="json")))
    dtype = autocast_dtype(accelerator.device, task.target.dtype)
    Trainer(recipe, task, accelerator, checkpoint, folder / "training.jsonl", None, dtype).run()
    task.save(folder)


def excess(row: dict[str, Any], loss: float) -> str:
    """A loss above that of the best operator of a task, in per cent."""
    return f"{100 * (loss / min(row['losses'].values()) - 1):.2f}"


@click.command()
@click.option("--steps", default=200, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".autotune/paper-gate"), show_default=True)
def main(steps: int, folder: Path) -> None:
    falling = Recipe.load(DRAFT / "recipe.yaml").stages[-1].model_copy(update={"steps": steps})
    stages = {"falling": falling, "constant": ConstantBonus(**falling.model_dump())}
    rows = {"before": list(read_lines(DRAFT / OPERATOR_ROWS))}
    for name, stage in stages.items():
        output = folder / f"{name}-{steps}"
        if not (output / OPERATOR_ROWS).exists():
            train_further(stage, output)
            assert operators.callback is not None
            operators.callback(output)
        rows[name] = [json.loads(line) for line in (output / OPERATOR_ROWS).read_text().splitlines()]
    Console().table(
        f"digits/specvlm, and after {steps} further steps with a falling and with a constant entropy bonus",
        ["task", "weights", "margin", "gate", "resample", "text_only", "best operator", "chosen"],
        [
            [
                row["task"],
                name,
                f"{row['margin']:.3f}",
                excess(row, row["gate_loss"]),
                *(excess(row, row["losses"][operator]) for operator in ("resample", "text_only")),
                min(row["losses"], key=row["losses"].__getitem__),
                ", ".join(f"{operator} {count}" for operator, count in row["chosen"].items() if count),
            ]
            for of_task in zip(*rows.values(), strict=True)
            for name, row in zip(rows, of_task, strict=True)
        ],
    )


if __name__ == "__main__":
    main()
