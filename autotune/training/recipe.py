"""What to train and how: a YAML file beside the weights that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import NETWORKS
from autotune.errors import UserError
from autotune.files import Document
from autotune.modeling.loading import resolve
from autotune.training.teacher import DistillationRule
from autotune.workloads.digits import TASKS

Objective = Literal["grounding", "answers", "distillation", "drafting"]
FEATURE_DRAFTS = tuple(NETWORKS)


class Stage(Document):
    """Some steps towards one objective, with AdamW under linear warm-up and cosine decay.

    ``grounding`` classifies the digit under every visual token, and trains the vision tower and projector alone;
    ``answers`` is next-token cross-entropy on the reference answers, plus ``grounding_weight`` times the grounding
    loss; ``distillation`` is KL divergence from the teacher's distribution at every answer position; ``drafting`` is
    that for drafts that read the target's features, and resemblance to these.
    """

    objective: Objective
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(default=50, ge=0)
    weight_decay: float = Field(default=0.05, ge=0)
    grounding_weight: float = Field(default=0.0, ge=0)
    min_visual_keep: float = Field(default=1.0, gt=0, le=1)
    """Distillation: half of the steps drop visual tokens at random, down to this share, so that pruning finds a draft
    that has seen it.
    """
    subnets: Literal["full", "random"] = "full"
    """Drafting: the whole network, or of ``star`` another subnet at every step (the second phase of its training)."""
    whole_share: float = Field(default=0.0, ge=0, le=1)
    """Drafting with random subnets: of the steps, those that train the whole network instead."""
    subnet: Subnet | None = None
    """Drafting: one subnet of ``star`` alone."""
    logit_weight: float = Field(default=1.0, ge=0)
    """Drafting: of the divergence from the target's distributions."""
    feature_weight: float = Field(default=0.2, ge=0)
    """Drafting: of the loss that brings the draft's states to the target's last features."""
    distillation: DistillationRule = "none"
    """Drafting: which layer of the target the first block resembles: of least attention entropy (DREAM), or of least
    entropy and change of it (STAR).
    """
    distillation_weight: float = Field(default=0.2, ge=0)


class Data(Document):
    """Which examples a draft that reads features learns from: lines of a file, or those of the bundled workload."""

    file: str | None = None
    """JSONL, relative to the recipe: see ``AnsweredPrompt``. None: the bundled workload."""
    num_examples: int | None = Field(default=None, ge=1)
    """Different ones; then they come again in another order, and what the target makes of them is kept in
    ``.autotune/lessons``. None: all of the file; of the bundled workload every example is new.
    """
    seed: int = 0
    """Recipes of one seed share their examples, and what is kept of them."""


class Recipe(Document, kind="recipe"):
    """A model to train."""

    name: str
    description: str
    model: Literal["target", "independent", "star", "dream", "specvlm"]
    teacher: str | None = None
    """The target that a draft is for: a folder, relative to the recipe, or of drafts that read its features also a
    Hugging Face id. The draft takes its tokenizer and processor.
    """
    draft: dict[str, Any] = Field(default_factory=dict)
    """Sizes of a draft that reads the target's features: fields of its config."""
    teacher_layers: list[int] | None = None
    """Start from the teacher: its text layers of these numbers, and all that is not a text layer. The sizes must be the
    teacher's; without it a draft starts from random weights.
    """
    vocabulary_size: int | None = Field(default=None, ge=300)
    """Size of the byte-pair vocabulary trained on the workload's own text: required for ``target``."""
    text: dict[str, Any] = Field(default_factory=dict)
    """Overrides of transformers' LlamaConfig."""
    vision: dict[str, Any] = Field(default_factory=dict)
    """Overrides of transformers' CLIPVisionConfig."""
    tasks: dict[str, float] = Field(default_factory=lambda: dict.fromkeys(TASKS, 1.0))
    """Relative frequency of each task of the bundled workload in training."""
    data: Data = Data()
    seed: int = 0
    stages: list[Stage] = Field(min_length=1)


def load_recipe(path: Path) -> Recipe:
    """The recipe in ``path``.

    Raises:
        UserError: no such file, no YAML, an unknown or missing key, an unknown task.
    """
    recipe = Recipe.load(path)
    if unknown := set(recipe.tasks) - set(TASKS):
        raise UserError(
            f"{path}: a recipe's tasks are among {', '.join(TASKS)}; got {', '.join(sorted(unknown))}; remove or rename them"
        )
    if recipe.model != "target" and recipe.teacher is None:
        raise UserError(f"{path}: a draft is distilled from a target; add 'teacher: ../target' to the recipe")
    for stage in recipe.stages:
        if (stage.objective == "drafting") != (recipe.model in FEATURE_DRAFTS):
            raise UserError(
                f"{path}: the objective of {', '.join(FEATURE_DRAFTS)} is drafting, and of no other model; "
                f"got {stage.objective} for {recipe.model}; change one of them"
            )
    if recipe.data.file is not None and recipe.model not in FEATURE_DRAFTS:
        raise UserError(
            f"{path}: a file of examples is for {', '.join(FEATURE_DRAFTS)}; got data.file for {recipe.model}; drop it"
        )
    if recipe.data.file is not None and "tasks" in recipe.model_fields_set:
        raise UserError(
            f"{path}: tasks are those of the bundled workload; got data.file {recipe.data.file!r} as well; drop one"
        )
    layers = recipe.text.get("num_hidden_layers")
    if recipe.teacher_layers is not None and len(recipe.teacher_layers) != layers:
        raise UserError(
            f"{path}: teacher_layers must name one layer for each of the {layers} text layers; mend the list"
        )
    if recipe.model == "target" and recipe.vocabulary_size is None:
        raise UserError(f"{path}: a target trains its own tokenizer; add 'vocabulary_size: 2048' to the recipe")
    return recipe


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
