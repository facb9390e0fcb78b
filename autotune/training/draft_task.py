"""Drafts that read the target's features in training: lessons of the teacher, and another subnet at every step."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from autotune.drafters.checkpoint import new_network, save_draft
from autotune.drafters.network import BlocksNetwork
from autotune.drafters.star import StarNetwork
from autotune.errors import UserError
from autotune.files import content_key
from autotune.models import load_model, load_processor, reference, resolve
from autotune.runtime.target import Target
from autotune.subnet import Subnet
from autotune.training.batches import Batches
from autotune.training.drafting import drafting_loss, sampled_subnet
from autotune.training.lessons import DigitsExamples, Lessons, Share
from autotune.training.recipe import Recipe, Stage
from autotune.training.teacher import Teacher

CACHE = Path(".autotune/lessons")
FIRST_SEED = 1000  # of examples for drafts: far from those of the models that the pair is made of
NUM_HELD_OUT = 3  # batches
EVALUATION = Stage(objective="drafting", steps=1, batch_size=1, learning_rate=1.0)


class DraftTask:
    """Trains a draft for the recipe's teacher (see ``Task``)."""

    module: BlocksNetwork

    def __init__(self, recipe: Recipe, recipe_path: Path, accelerator: Accelerator) -> None:
        self.recipe = recipe
        self.accelerator = accelerator
        self.teacher_name = teacher_name(recipe, recipe_path)
        self.processor = load_processor(self.teacher_name)
        self.target = Target(load_model(self.teacher_name, device=str(accelerator.device)))
        self.teacher = Teacher(self.target)
        torch.manual_seed(recipe.seed)
        self.module = new_network(recipe.model, recipe.draft, self.target, source=str(recipe_path)).to(
            accelerator.device
        )
        self._taking_part: list[Tensor] | None = None

    def begin(self, stage: Stage, number: int) -> list[nn.Parameter]:
        """Prepare a stage's examples; returns what it trains."""
        data = self.recipe.data
        batches = Batches(
            self.processor, self.recipe.tasks, split="train", batch_size=stage.batch_size, seed=FIRST_SEED + data.seed
        )
        num_batches = None if data.num_examples is None else max(1, data.num_examples // stage.batch_size)
        examples = DigitsExamples(batches, self.target, num_batches)
        process, num_processes = self.accelerator.process_index, self.accelerator.num_processes
        described = {
            "target": reference(self.teacher_name).sha256,
            "tasks": self.recipe.tasks,
            "data": data.model_dump(),
            "batch_size": stage.batch_size,
            "share": [process, num_processes],
        }
        self._lessons = Lessons(
            Share(examples, process, num_processes),
            self.teacher,
            layers=self.module.config.injection_layers,
            rule=stage.distillation,
            cache=CACHE / content_key(described),
            seed=10 * self.recipe.seed + number,
        )
        self._number = number
        held_out = DigitsExamples(
            Batches(self.processor, self.recipe.tasks, split="held-out", batch_size=stage.batch_size, seed=FIRST_SEED),
            self.target,
        )
        self._held_out = [
            self.teacher.lesson(held_out[number], layers=self.module.config.injection_layers)
            for number in range(NUM_HELD_OUT)
        ]
        return list(self.module.parameters())

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """Of one step, and figures to show."""
        seed = (self.recipe.seed * 1000 + self._number) * 1_000_000 + step
        generator = torch.Generator().manual_seed(seed)
        subnet, self._taking_part = self._subnet(stage, generator)
        return drafting_loss(self.module, self._lessons[step], stage, subnet, self._taking_part, generator)

    def _subnet(self, stage: Stage, generator: torch.Generator) -> tuple[Subnet, list[Tensor] | None]:
        """The subnet of a step, and the masks of its heads where there are any to mask."""
        if not isinstance(self.module, StarNetwork):
            return Subnet(visual_keep=self.module.config.visual_keep), None
        subnet = stage.subnet or Subnet()
        if stage.subnets == "random":
            subnet = sampled_subnet(self.module, generator)
        return subnet, self.module.head_masks(subnet.head_shares)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Figures of the whole draft on held-out examples, means over lessons."""
        keep = self.module.config.visual_keep
        found = []
        for lesson in self._held_out:
            generator = torch.Generator().manual_seed(0)
            found.append(drafting_loss(self.module, lesson, EVALUATION, Subnet(visual_keep=keep), None, generator)[1])
        return {f"held_out_{name}": sum(one[name] for one in found) / len(found) for name in found[0]}

    def after_backward(self) -> None:
        """Note which heads matter."""
        if isinstance(self.module, StarNetwork) and self._taking_part is not None:
            self.module.observe_importance(self._taking_part)

    def save(self, folder: Path) -> None:
        """The draft's config and weights."""
        save_draft(self.module, folder)


def teacher_name(recipe: Recipe, recipe_path: Path) -> str:
    """What the teacher is loaded by: a folder beside the recipe, or a name that ``load_model`` knows.

    Raises:
        UserError: neither.
    """
    assert recipe.teacher is not None
    folder = (recipe_path.parent / recipe.teacher).resolve()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise UserError(
                f"{recipe_path}: its teacher {folder} has no weights; train it first: autotune train {folder / 'recipe.yaml'}"
            )
        return str(folder)
    resolve(recipe.teacher)
    return recipe.teacher
