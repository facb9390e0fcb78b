"""Training recipes: YAML files that describe a draft, its examples and its training stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import Document
from autotune.modeling.loading import resolve
from autotune.training.divergence import DivergenceName
from autotune.training.teacher import DistillationRule

UNROLLED = ("eagle3", "mtp")
"""Drafts that are trained by unrolling their own drafting (``training/unrolled.py``)."""
LOSS_WEIGHTS = {
    "dream": (1.0, 0.2),  # DREAM, section 4
    "star": (1.0, 0.2),  # STAR, eq. 3
    "specvlm": (0.1, 1.0),  # SpecVLM, eq. 3
    "eagle3": (1.0, 0.0),  # EAGLE-3 has no loss of features
    "mtp": (1.0, 0.0),
}
"""Weights of the logits' and of the features' loss in the paper of each draft."""


class Stage(Document):
    """Training steps with linear warm-up and cosine decay (``training/losses.py``, ``training/unrolled.py``)."""

    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(default=50, ge=0)
    weight_decay: float = Field(default=0.05, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of AdamW's moments."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Highest norm of the gradient of all parameters."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon`` orthogonalizes the updates of the layers' matrices (Jordan et al. 2024), at the size of AdamW's updates; all
    other parameters keep AdamW.
    """
    final_rate: float = Field(default=0.05, ge=0, le=1)
    """Learning rate at the end of the stage, as a share of the highest one."""
    subnets: Literal["full", "random"] = "full"
    """The full network, or for ``star`` a random subnet at every step (the second phase of its training)."""
    whole_share: float = Field(default=0.0, ge=0, le=1)
    """With random subnets: share of the steps that train the full network instead."""
    subnet: Subnet | None = None
    """Train only this subnet of ``star``."""
    logit_weight: float | None = Field(default=None, ge=0)
    """Weight of the KL divergence from the target's distributions. None: that of the draft's paper."""
    feature_weight: float | None = Field(default=None, ge=0)
    """Weight of the SmoothL1 loss between the draft's states and the target's last features. None: that of the draft's paper."""
    divergence: DivergenceName = "kl"
    """How the draft's distributions are compared with the target's: ``kl``, or ``lk``, which weighs
    the acceptance rate more the higher it is (``training/divergence.py``).
    """
    unrolled_steps: int = Field(default=6, ge=1)
    """Training of ``eagle3`` and ``mtp``: number of tokens that are drafted at every position, one from the next."""
    gate_examples: int = Field(default=1, ge=1)
    """``specvlm`` with a selecting gate: examples of each batch on which the losses of all operators are
    compared to train the gate.
    """
    gate_cost: float = Field(default=0.01, ge=0)
    """Cost of an operator that leaves all visual rows, as a share of the mean loss of the operators."""
    distillation: DistillationRule | Annotated[int, Field(ge=1)] = "none"
    """The target layer that the first block imitates: the one of least attention entropy (DREAM, section 3.2), the
    one of least entropy plus change of entropy (STAR, section 3.2), or always the layer of this number (from 1).
    """
    distillation_weight: float = Field(default=0.2, ge=0)

    def loss_weights(self, kind: str) -> tuple[float, float]:
        """Weights of the logits' and of the features' loss for a kind of draft."""
        logit_weight, feature_weight = LOSS_WEIGHTS[kind]
        return (
            logit_weight if self.logit_weight is None else self.logit_weight,
            feature_weight if self.feature_weight is None else self.feature_weight,
        )


class Data(Document):
    """Training examples: the lines of a file."""

    file: str
    """JSONL, relative to the recipe: see ``AnsweredPrompt``."""
    num_examples: int | None = Field(default=None, ge=1)
    """Number of different examples; None: all of the file. They are repeated in another order each epoch, and the target's outputs
    on them are cached in ``.autotune/teacher-batches``.
    """
    seed: int = 0
    """Recipes with the same seed share cached teacher batches."""


class Recipe(Document, kind="recipe"):
    """A draft to train."""

    name: str
    description: str
    model: Literal["star", "dream", "specvlm", "eagle3", "mtp"]
    teacher: str
    """The target: a folder relative to the recipe, or a Hugging Face id. The draft uses its tokenizer and processor."""
    draft: dict[str, Any] = Field(default_factory=dict)
    """Config fields of the draft."""
    initial_weights: Literal["new", "stored"] = "new"
    """Weights with which training begins: new ones, or those stored beside the recipe."""
    trained_stages: int = Field(default=0, ge=0)
    """Number of stages, from the first, whose result is the draft stored beside the recipe: without a checkpoint, training
    begins with the next one.
    """
    compile: bool = False
    """Compile the comparison of draft and target with ``torch.compile``, which needs a C++ compiler on the CPU."""
    data: Data
    seed: int = 0
    stages: list[Stage] = Field(min_length=1)


def load_recipe(path: Path) -> Recipe:
    """Load and validate a recipe.

    Raises:
        UserError: missing file, invalid YAML, unknown or missing key, or settings that contradict each other.
    """
    recipe = Recipe.load(path)
    for contradiction in _contradictions(recipe):
        raise UserError(f"{path}: {contradiction}")
    return recipe


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """The rules that a recipe breaks, with the value and the next step."""
    if recipe.trained_stages >= len(recipe.stages):
        yield f"trained_stages must leave a stage to train; got {recipe.trained_stages} of {len(recipe.stages)}; add a stage"
    if recipe.model in UNROLLED:
        for stage in recipe.stages:
            if stage.distillation != "none" or stage.subnets != "full" or stage.feature_weight:
                rule = f"an {recipe.model} head has no subnets and imitates no features"
                yield f"{rule}; remove distillation, subnets and feature_weight"
    if recipe.model == "mtp" and recipe.draft:
        yield f"an mtp head has the sizes of its target's layers; got draft {recipe.draft}; remove it"


def teacher_name(recipe: Recipe, recipe_path: Path) -> str:
    """The name by which ``load_model`` finds the teacher: a folder relative to the recipe, or a model name.

    Raises:
        UserError: no such model.
    """
    folder = (recipe_path.parent / recipe.teacher).resolve()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise UserError(f"{recipe_path}: the teacher {folder} has no config.json; name a folder with a model")
        return str(folder)
    resolve(recipe.teacher)
    return recipe.teacher
