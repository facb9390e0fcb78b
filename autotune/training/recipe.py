"""Training recipes: YAML files that describe a draft, its examples and its training stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetPydanticSchema, JsonValue, model_validator
from pydantic_core.core_schema import literal_schema

from autotune.documents.draft_kinds import KINDS, TRAINED
from autotune.documents.loss_settings import LossSettings
from autotune.errors import errors_about
from autotune.files import Document
from autotune.modeling.loading import Dtype, resolve
from autotune.workloads.formats import read_answered


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
    """Questions that the target writes itself, see ``training.examples.write_questions``."""

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
    model: Annotated[str, GetPydanticSchema(lambda *_: literal_schema([*TRAINED]))]
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

    @model_validator(mode="after")
    def _is_consistent(self) -> Recipe:
        kind, magpie = KINDS[self.model], self.data.magpie
        if kind.is_unrolled and any(
            stage.distillation != "none" or stage.subnets != "full" or stage.feature_weight for stage in self.stages
        ):
            raise ValueError(
                f"an {self.model} head has no subnets and imitates no features; remove distillation, subnets and feature_weight"
            )
        if kind.is_target_layer and self.draft:
            raise ValueError(
                f"an {self.model} head has the sizes of its target's layers; got draft {self.draft}; remove it"
            )
        if magpie is not None and (self.data.num_examples or 0) >= magpie.num_prompts:
            raise ValueError(
                f"some of the magpie.num_prompts questions are held out, so num_examples must be lower; got "
                f"{self.data.num_examples} of {magpie.num_prompts}; raise num_prompts"
            )
        return self


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


def require_trainable(path: Path) -> None:
    """Refuse, before torch is imported, a recipe that cannot be read, or whose target or file of examples cannot.

    Raises:
        UserError: missing file, invalid YAML, an unknown or missing key, settings that contradict each other, no such
            target, or an invalid line of the examples.
    """
    recipe = Recipe.load(path)
    teacher_name(recipe, path)
    if recipe.data.magpie is None:
        read_answered(path.parent / recipe.data.file)
