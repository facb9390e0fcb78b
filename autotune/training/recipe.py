"""Training recipes: YAML files that describe a draft, its examples and its training stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetPydanticSchema, JsonValue
from pydantic_core.core_schema import literal_schema

from autotune.drafters.checkpoint import NETWORKS
from autotune.drafters.trainable import LossSettings
from autotune.errors import UserError, errors_about
from autotune.files import Document
from autotune.modeling.loading import Dtype, resolve


class Stage(LossSettings):
    """Training steps with linear warm-up and cosine decay."""

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
    """``muon`` orthogonalizes the updates of the layers' matrices (Jordan et al. 2024), at the size of AdamW's updates;
    all other parameters keep AdamW.
    """
    final_rate: float = Field(default=0.05, ge=0, le=1)
    """Learning rate at the end of the stage, as a share of the highest one."""


class Magpie(Document):
    """Questions that the target writes itself, see ``training.magpie``."""

    num_prompts: int = Field(ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    question_tokens: int = Field(default=128, ge=1)
    """Longest question; longer ones are left out."""
    answer_tokens: int = Field(default=256, ge=1)
    """Limit of the answers."""


class Data(Document):
    file: str
    """JSONL, relative to the recipe: see ``AnsweredPrompt``."""
    magpie: Magpie | None = None
    """Let the target write ``file``, or continue it."""
    judged: list[str] = Field(default_factory=list)
    """Workloads that will judge the draft, as files relative to the recipe or names of bundled ones: their prompts are
    not trained on.
    """
    num_examples: int | None = Field(default=None, ge=1)
    """Number of different prompts; None: all of the file. They are repeated in another order each epoch, and the
    target's outputs on them are cached in ``.autotune/teacher-batches``.
    """
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(default_factory=list)
    """Temperatures of the answers that the target writes: each prompt has one answer of each, and is as many examples.
    Empty: one answer, at the line's own temperature.
    """
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the target's chat template, for the lines that do not set them."""
    seed: int = 0
    """Recipes with the same seed share cached teacher batches."""


class Recipe(Document, kind="recipe"):
    name: str
    description: str
    model: Annotated[str, GetPydanticSchema(lambda *_: literal_schema([*NETWORKS]))]
    """The kind of the draft."""
    teacher: str
    """The target: a folder or GGUF file relative to the recipe, or the name of a model. The draft uses its tokenizer
    and processor.
    """
    dtype: Dtype | None = None
    """Data type of the target; None: as of ``load_model``."""
    draft: dict[str, Any] = Field(default_factory=dict)
    """Config fields of the draft."""
    vocabulary: int | None = Field(default=None, ge=1)
    """Train on the tokens that the answers hold most often, so many of them (the vocabulary of FR-Spec, Zhao et al.
    2025): draft and target are compared over these, and the output head of ``eagle3`` has no others. None: all tokens.
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
    for contradiction in NETWORKS[recipe.model].contradictions(recipe.draft, recipe.stages):
        raise UserError(f"{path}: {contradiction}")
    data = recipe.data
    if data.magpie is not None and (data.num_examples or 0) >= data.magpie.num_prompts:
        raise UserError(
            f"{path}: some of the magpie.num_prompts questions are held out, so num_examples must be lower; got "
            f"{data.num_examples} of {data.magpie.num_prompts}; raise num_prompts"
        )
    return recipe


def teacher_name(recipe: Recipe, recipe_path: Path) -> str:
    """The name by which ``load_model`` finds the teacher: a path relative to the recipe, or a model name.

    Raises:
        UserError: no such model.
    """
    path = (recipe_path.parent / recipe.teacher).resolve()
    name = str(path) if path.exists() else recipe.teacher
    with errors_about(str(recipe_path)):
        resolve(name)
    return name
