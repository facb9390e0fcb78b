"""Drafts that read the target's features in training: lessons of the teacher, and another subnet at every step."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from autotune.drafters.checkpoint import new_network, save_draft
from autotune.drafters.dream import DreamNetwork
from autotune.drafters.star import StarNetwork, StarSubnet
from autotune.errors import UserError
from autotune.models import load_model, load_processor, resolve
from autotune.runtime.target import Target
from autotune.training.batches import Batches
from autotune.training.drafting import drafting_loss, sampled_subnet
from autotune.training.lessons import DigitsExamples
from autotune.training.recipe import Recipe, Stage
from autotune.training.teacher import Teacher


class DraftTask:
    """Trains a draft for the recipe's teacher (see ``Task``)."""

    module: DreamNetwork

    def __init__(self, recipe: Recipe, recipe_path: Path, accelerator: Accelerator) -> None:
        self.recipe = recipe
        self.accelerator = accelerator
        name = teacher_name(recipe, recipe_path)
        self.processor = load_processor(name)
        self.target = Target(load_model(name, device=str(accelerator.device)))
        self.teacher = Teacher(self.target)
        torch.manual_seed(recipe.seed)
        self.module = new_network(recipe.model, recipe.draft, self.target, source=str(recipe_path)).to(
            accelerator.device
        )
        self._taking_part: list[Tensor] | None = None

    def begin(self, stage: Stage, number: int) -> list[nn.Parameter]:
        """Prepare a stage's examples; returns what it trains."""
        batches = Batches(
            self.processor,
            self.recipe.tasks,
            split="train",
            batch_size=stage.batch_size,
            seed=10 * self.recipe.seed + number,
        )
        self._examples = DigitsExamples(batches, self.target)
        self._number = number
        return list(self.module.parameters())

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """Of one step, and figures to show."""
        seed = (self.recipe.seed * 1000 + self._number) * 1_000_000 + step
        generator = torch.Generator().manual_seed(seed)
        subnet, self._taking_part = self._subnet(stage, generator)
        examples = self._examples[step][self.accelerator.process_index :: self.accelerator.num_processes]
        lesson = self.teacher.lesson(examples, seed=seed, with_entropies=stage.distillation != "none")
        return drafting_loss(self.module, lesson, stage, subnet, self._taking_part, generator)

    def _subnet(self, stage: Stage, generator: torch.Generator) -> tuple[StarSubnet, list[Tensor] | None]:
        """The subnet of a step, and the masks of its heads where there are any to mask."""
        if not isinstance(self.module, StarNetwork):
            return StarSubnet(visual_keep=self.module.config.visual_keep), None
        subnet = stage.subnet or StarSubnet()
        if stage.subnets == "random":
            subnet = sampled_subnet(self.module, generator)
        return subnet, self.module.head_masks(subnet.head_shares)

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
