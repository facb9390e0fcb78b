"""Training recipes: YAML files that describe a model, its data and its training stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import NETWORKS
from autotune.errors import UserError
from autotune.files import Document
from autotune.modeling.loading import resolve
from autotune.training.divergence import DivergenceName
from autotune.training.teacher import DistillationRule
from autotune.workloads.code.examples import CODE_TASKS
from autotune.workloads.code.judge import OPEN_TASKS
from autotune.workloads.digits import TASKS

Objective = Literal["grounding", "answers", "text", "distillation", "drafting"]
UNROLLED = ("eagle3", "mtp")
"""Drafts that are trained by unrolling their own drafting (``training/unrolled.py``)."""
WITHOUT_SUBNETS = (*UNROLLED, "dflash")
FEATURE_DRAFTS = (*NETWORKS, *WITHOUT_SUBNETS)
FILES = "files"
"""Share of rows that are windows of files alone, among the tasks of the workload ``code``."""
WORKLOAD_TASKS: dict[str, tuple[str, ...]] = {"digits": TASKS, "code": (*CODE_TASKS, FILES)}
LOSS_WEIGHTS = {
    "dream": (1.0, 0.2),  # DREAM, section 4
    "star": (1.0, 0.2),  # STAR, eq. 3
    "specvlm": (0.1, 1.0),  # SpecVLM, eq. 3
    "eagle3": (1.0, 0.0),  # EAGLE-3 has no loss of features
    "mtp": (1.0, 0.0),
    "dflash": (1.0, 0.0),
}
"""Weights of the logits' and of the features' loss in the paper of each draft."""


class Stage(Document):
    """Training steps with one objective, with linear warm-up and cosine decay.

    * ``grounding`` classifies the digit under every visual token and trains only the vision tower and the projector.
    * ``answers`` is next-token cross-entropy on the reference answers plus ``grounding_weight`` times the grounding loss.
    * ``text`` is next-token cross-entropy on rows of files and tasks, for text models (``training/text_task.py``).
    * ``distillation`` is the KL divergence from the teacher's distribution at every answer position.
    * ``drafting`` trains drafts that read the target's features (``training/losses.py``, ``training/unrolled.py``).
    """

    objective: Objective
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
    tasks: dict[str, float] | None = None
    """Relative frequency of each task in this stage. None: the recipe's."""
    sequence_length: int = Field(default=512, ge=16)
    """Text: tokens of a row."""
    num_layers: int | None = Field(default=None, ge=1)
    """Text: number of layers that run in this stage. When a later stage has more, the new ones begin as copies of those before
    them (Gong et al. 2019), with their share of the residual update. None: all layers.
    """
    own_answers: int = Field(default=0, ge=0)
    """Text: number of prompts of the open tasks (``complete``, ``document``, ``continue``) that the model answers when the stage begins.
    Their good parts (``workloads/code/judge.py``) take the place of the reference answers of these tasks (rejection sampling fine-tuning,
    arXiv 2308.01825). They are stored in ``.autotune/sampled-answers``. 0: reference answers.
    """
    own_answers_temperature: float = Field(default=1.0, gt=0)
    """Text: sampling temperature of the model's own answers."""
    answer_weight: float = Field(default=1.0, gt=0)
    """Text: weight of the loss of an answer's tokens. That of prompts and files is 1."""
    grounding_weight: float = Field(default=0.0, ge=0)
    min_visual_keep: float = Field(default=1.0, gt=0, le=1)
    """Distillation: half of the steps drop visual tokens at random, down to this share, so that the draft tolerates pruning."""
    subnets: Literal["full", "random"] = "full"
    """Drafting: the full network, or for ``star`` a random subnet at every step (the second phase of its training)."""
    whole_share: float = Field(default=0.0, ge=0, le=1)
    """Drafting with random subnets: share of the steps that train the full network instead."""
    subnet: Subnet | None = None
    """Drafting: train only this subnet of ``star``."""
    logit_weight: float | None = Field(default=None, ge=0)
    """Drafting: weight of the KL divergence from the target's distributions. None: that of the draft's paper."""
    feature_weight: float | None = Field(default=None, ge=0)
    """Drafting: weight of the SmoothL1 loss between the draft's states and the target's last features. None: that of the
    draft's paper.
    """
    divergence: DivergenceName = "kl"
    """Distillation and drafting: how the draft's distributions are compared with the target's: ``kl``, or ``lk``, which weighs
    the acceptance rate more the higher it is (``training/divergence.py``).
    """
    unrolled_steps: int = Field(default=6, ge=1)
    """Training of ``eagle3`` and ``mtp``: number of tokens that are drafted at every position, one from the next."""
    mtp_weight: float = Field(default=0.0, ge=0)
    """Text: weight of the loss of the recipe's ``mtp`` head, whose gradient reaches the model too. 0: the head is not trained."""
    mtp_rows: int | None = Field(default=None, ge=1)
    """Text: rows of each batch on which the head is trained. None: all."""
    gate_examples: int = Field(default=1, ge=1)
    """Drafting of ``specvlm`` with a selecting gate: examples of each batch on which the losses of all operators are
    compared to train the gate.
    """
    gate_cost: float = Field(default=0.01, ge=0)
    """Cost of an operator that leaves all visual rows, as a share of the mean loss of the operators."""
    distillation: DistillationRule | Annotated[int, Field(ge=1)] = "none"
    """Drafting: the target layer that the first block imitates: the one of least attention entropy (DREAM, section 3.2), the
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
    """Training examples of a draft that reads features: lines of a file, or examples of the bundled workload."""

    file: str | None = None
    """JSONL, relative to the recipe: see ``AnsweredPrompt``. None: the bundled workload."""
    num_examples: int | None = Field(default=None, ge=1)
    """Number of different examples. They are repeated in another order each epoch, and the target's outputs on them are
    cached in ``.autotune/teacher-batches``. None: the whole file; for the bundled workload every example is new.
    """
    sampled_share: float = Field(default=0.0, ge=0, le=1)
    """Workload ``code``: share of the batches whose answers the target samples, so that a draft is trained on what the target
    writes when it decodes (DistillSpec, arXiv 2310.08461). They are cached in ``.autotune/sampled-answers``.
    """
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(default=(1.0,), min_length=1)
    """Temperatures of these answers, in turns; 0 is greedy."""
    seed: int = 0
    """Recipes with the same seed share examples and cached teacher batches."""


class Recipe(Document, kind="recipe"):
    """A model to train."""

    name: str
    description: str
    model: Literal["target", "independent", "star", "dream", "specvlm", "eagle3", "mtp", "dflash"]
    teacher: str | None = None
    """The target of a draft: a folder relative to the recipe, or (for drafts that read features) a Hugging Face id. The
    draft uses its tokenizer and processor.
    """
    draft: dict[str, Any] = Field(default_factory=dict)
    """Config fields of a draft that reads the target's features."""
    teacher_layers: list[int] | None = None
    """Text layers of the teacher from which the draft's layers are initialized, together with everything that is not a text
    layer; sizes must be the teacher's. None: random initialization.
    """
    vocabulary_size: int | None = Field(default=None, ge=300)
    """Size of the byte-pair vocabulary trained on the workload's text; required for ``target``."""
    text: dict[str, Any] = Field(default_factory=dict)
    """Overrides of ``LlamaConfig``."""
    vision: dict[str, Any] = Field(default_factory=dict)
    """Overrides of ``CLIPVisionConfig``."""
    workload: Literal["digits", "code"] = "digits"
    """Bundled workload whose tasks the model is trained on."""
    tasks: dict[str, float] = Field(
        default_factory=lambda values: dict.fromkeys(WORKLOAD_TASKS[values.get("workload", "digits")], 1.0)
    )
    """Relative frequency of each task of the bundled workload in training."""
    mtp: str | None = None
    """Folder, relative to the recipe's, of a multi-token prediction head that is trained with the text model (DeepSeek-V3,
    arXiv 2412.19437, section 2.2) in stages with an ``mtp_weight``.
    """
    initial_weights: Literal["new", "stored"] = "new"
    """Weights with which training of a draft that reads features begins: new ones, or those stored beside the recipe."""
    trained_stages: int = Field(default=0, ge=0)
    """Number of stages, from the first, whose result is the model stored beside the recipe: without a checkpoint, training
    begins with the next one.
    """
    compile: bool = False
    """Compile the comparison of draft and target, and the layers and the loss of a text model and of its teacher, with
    ``torch.compile``, which needs a C++ compiler on the CPU. Text models then attend in blocks
    (``training/causal_attention.py``).
    """
    data: Data = Data()
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


def trained_folder(
    recipe_path: Path, setting: str = "trained_stages needs the model of these stages", value: str = "0"
) -> Path:
    """The folder of the model from which a recipe continues.

    Raises:
        UserError: it has none.
    """
    if not (recipe_path.parent / "config.json").exists():
        raise UserError(f"{recipe_path}: {setting} in {recipe_path.parent}; set it to {value}")
    return recipe_path.parent


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """The rules that a recipe breaks, with the value and the next step."""
    reads_features, num_layers = recipe.model in FEATURE_DRAFTS, recipe.text.get("num_hidden_layers")
    known = WORKLOAD_TASKS[recipe.workload]
    for tasks in (recipe.tasks, *(stage.tasks or {} for stage in recipe.stages)):
        if unknown := ", ".join(sorted(set(tasks) - set(known))):
            yield f"tasks must be among {', '.join(known)}; got {unknown}; remove or rename them"
    if recipe.trained_stages >= len(recipe.stages):
        yield f"trained_stages must leave a stage to train; got {recipe.trained_stages} of {len(recipe.stages)}; add a stage"
    if recipe.trained_stages and recipe.workload == "digits" and not reads_features:
        yield f"trained_stages is for models of the workload code and for drafts that read features; got it for {recipe.model}; set it to 0"
    if recipe.initial_weights == "stored" and not reads_features:
        yield f"initial_weights is for {', '.join(FEATURE_DRAFTS)}; got stored for {recipe.model}; remove it"
    trains_head = any(stage.mtp_weight > 0 for stage in recipe.stages)
    if trains_head != (recipe.mtp is not None):
        yield (
            f"mtp names the head that stages with an mtp_weight train; got mtp {recipe.mtp} and "
            f"{'such a stage' if trains_head else 'no such stage'}; give both or neither"
        )
    if recipe.mtp is not None and (recipe.model, recipe.workload) != ("target", "code"):
        yield f"mtp is for targets of the workload code; got it for {recipe.model} of {recipe.workload}; remove it"
    if recipe.model != "target" and recipe.teacher is None:
        yield "a draft needs a teacher; add 'teacher: ../target' to the recipe"
    for stage in recipe.stages:
        if (stage.objective == "drafting") != reads_features:
            rule = f"objective drafting is for {', '.join(FEATURE_DRAFTS)}, the others for other models"
            yield f"{rule}; got {stage.objective} for {recipe.model}; change one of them"
        if recipe.model in WITHOUT_SUBNETS and (
            stage.distillation != "none" or stage.subnets != "full" or stage.feature_weight
        ):
            what = f"an {recipe.model} head" if recipe.model in UNROLLED else f"a {recipe.model} draft"
            yield f"{what} has no subnets and imitates no features; remove distillation, subnets and feature_weight"
        compares = stage.objective == "drafting" or stage.mtp_weight > 0
        compares |= stage.objective == "distillation" and recipe.workload == "code"
        if stage.divergence != "kl" and not compares:
            yield (
                f"divergence is for drafts, and for stages with an mtp_weight; got {stage.divergence} for the objective "
                f"{stage.objective} of {recipe.workload}; remove it"
            )
        of_text = {"own_answers", "own_answers_temperature", "answer_weight"} & stage.model_fields_set
        if of_text and stage.objective != "text":
            names = " and ".join(sorted(of_text))
            yield f"{names} of a stage is for the objective text; got it for {stage.objective}; remove it"
        if "own_answers_temperature" in stage.model_fields_set and stage.own_answers == 0:
            yield (
                f"own_answers_temperature is for stages with own_answers; got {stage.own_answers_temperature} without; "
                "add own_answers, or remove it"
            )
        if stage.own_answers > 0 and not set(OPEN_TASKS) & set(stage.tasks or recipe.tasks):
            yield f"own_answers needs a task among {', '.join(OPEN_TASKS)}; got {', '.join(stage.tasks or recipe.tasks)}; add one"
        if stage.objective == "text" and recipe.workload == "digits":
            yield "objective text is for the workload code; got it for digits; change one of them"
        if recipe.workload == "code" and stage.objective in ("grounding", "answers"):
            yield f"objectives of the workload code are text, distillation and drafting; got {stage.objective}; change it"
        if stage.objective == "distillation" and recipe.teacher is None:
            yield "objective distillation needs a teacher; add 'teacher: ../target' to the recipe"
    if recipe.model == "mtp" and recipe.draft:
        yield f"an mtp head has the sizes of its target's layers; got draft {recipe.draft}; remove it"
    if recipe.data.file is not None and not reads_features:
        yield f"data.file is for {', '.join(FEATURE_DRAFTS)}; got it for {recipe.model}; remove it"
    if recipe.data.sampled_share and (
        recipe.workload == "digits" or not reads_features or recipe.data.file is not None
    ):
        yield (
            f"sampled_share is for {', '.join(FEATURE_DRAFTS)} on the workload code; got it for {recipe.model} on "
            f"{recipe.data.file or recipe.workload}; remove it"
        )
    has_tasks = "tasks" in recipe.model_fields_set or any(stage.tasks is not None for stage in recipe.stages)
    if recipe.data.file is not None and has_tasks:
        yield f"tasks apply to the bundled workload only; got data.file {recipe.data.file!r} as well; remove one of them"
    if recipe.teacher_layers is not None and len(recipe.teacher_layers) != num_layers:
        yield f"teacher_layers must name one layer for each of the {num_layers} text layers; fix the list"
    if recipe.model == "target" and recipe.vocabulary_size is None:
        yield "a target needs a vocabulary size for its tokenizer; add 'vocabulary_size: 2048' to the recipe"


def teacher_name(recipe: Recipe, recipe_path: Path) -> str:
    """The name by which ``load_model`` finds the teacher: a folder relative to the recipe, or a model name.

    Raises:
        UserError: no such model.
    """
    assert recipe.teacher is not None
    folder = (recipe_path.parent / recipe.teacher).resolve()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise UserError(
                f"{recipe_path}: the teacher {folder} has no weights; train it first: autotune train {folder / 'recipe.yaml'}"
            )
        return str(folder)
    resolve(recipe.teacher)
    return recipe.teacher
