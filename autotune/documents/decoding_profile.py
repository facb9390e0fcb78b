"""Decoding profiles: the operating point that a search found, with the evidence for it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, JsonValue, model_validator

from autotune.documents.decoded import Decoded
from autotune.documents.deployment import RUNTIME, BackendResult, Deployment, EngineEvidence, backends_table
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance, beside
from autotune.documents.subnet import Subnet
from autotune.files import Document, content_key
from autotune.table import Table, number, times, with_interval
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import Policy
from autotune.trees.verification import LosslessVerification, Verification

AR, HF, TUNED = "ar", "hf", "tuned"
"""Names of arms: plain decoding, Hugging Face's ``generate``, and the profile itself."""
ARM_NOTES = {AR: "plain decoding", HF: "Hugging Face's generate", "M": "mean number of tokens of a round"}
"""Explanations below tables of arms."""


class DraftChoice(Document):
    """The draft of an operating point."""

    kind: str
    id: str
    sha256: str
    subnet: Subnet = Field(default_factory=Subnet)


class Predicted(Document):
    """Prediction by replay and cost table, on the tuning prompts."""

    speedup: float
    ms_per_token: float
    tokens_per_round: float | None
    interval90: tuple[float, float] | None = None
    """90 % interval of the speedup on other prompts, by the errors of the cost table and the variation over prompts;
    null where it was not estimated.
    """
    estimated: bool = False
    """Whether the cost table is an estimate from a datasheet."""


class Measured(Document):
    """Measurement of real runs, interleaved with plain decoding, on the evaluation prompts."""

    speedup: float
    ci95: tuple[float, float]
    """Paired bootstrap over prompts."""
    tokens_per_round: float | None
    tokens_per_second: float
    num_prompts: int
    identical_outputs: int
    """Number of prompts whose output equals plain decoding."""


class OperatingPoint(Document):
    """A draft and a tree policy, or an engine's deployment. All are null for plain decoding in the runtime."""

    draft: DraftChoice | None
    tree: Policy | None
    deployment: Deployment | None = None
    """The engine that serves the requests, in place of the runtime."""
    verification: Verification = Field(default_factory=LosslessVerification)
    fallback: RoundPrice | None = None
    """Cost of a round in plain steps: a request whose rounds cost more continues with plain steps. Null: it never does.
    """
    predicted: Predicted | None
    measured: Measured | None

    @model_validator(mode="after")
    def _complete(self) -> OperatingPoint:
        if (self.draft is None) != (self.tree is None):
            raise ValueError("a point has both a draft and a tree, or neither; give both, or null for both")
        return self

    def located(self, source: Path) -> OperatingPoint:
        """The point with paths in place of the names of models that lie beside ``source``."""
        draft, deployment = self.draft, self.deployment
        if draft is not None:
            draft = draft.model_copy(update={"id": beside(source, draft.id)})
        if deployment is not None:
            model = deployment.model.model_copy(update={"id": beside(source, deployment.model.id)})
            deployment = deployment.model_copy(update={"model": model})
        return self.model_copy(update={"draft": draft, "deployment": deployment})

    @property
    def label(self) -> str:
        """The decoding method in one line; ``off`` for plain decoding."""
        if self.deployment is not None:
            return self.deployment.label
        return "off" if self.draft is None or self.tree is None else f"{self.tree.policy}, {self.draft.id}"


class ComparedArm(Measured):
    """An arm of the run in which the winner was measured, on the first ``num_prompts`` evaluation prompts."""

    name: str
    predicted_speedup: float | None


ALL = "all"
"""Stands for the prompts of all tasks in gains."""


class Gain(Document):
    """The speedup of the profile over another arm on held-out prompts of the same run."""

    task: str
    over: str
    """Name of the other arm."""
    speedup: float
    ci95: tuple[float, float]
    """Paired bootstrap over prompts."""
    num_prompts: int


class Differences(Document):
    """Answers of the profile to held-out prompts that differ from plain decoding, told apart by the rule of ``autotune
    check``.
    """

    rounding: int = 0  # first at a near tie, in reduced precision or with quantized weights
    other: list[str] = Field(default_factory=list)  # prompt, tokens, margin and noise of each
    unexamined: int = 0  # the budget had no time for them


class Evidence(Document):
    """The measurements behind the operating point."""

    prompts: list[Decoded] = Field(default_factory=list)
    """The profile on the held-out prompts, without tokens: a check compares counts with them."""
    plain_token_ms: list[float] = Field(default_factory=list)
    """Plain decoding's time per token after the first for each of them, in the same run; empty in profiles of versions
    that did not keep it.
    """
    compared: list[ComparedArm] = Field(default_factory=list)
    configurations_replayed: int = 0
    best_default: str | None = None
    """The published default that was fastest on held-out prompts; null where none was measured."""
    gains: list[Gain] = Field(default_factory=list)
    num_deciding: int | None = None
    """Runs on tuning prompts by which the winner was chosen; null where it was not measured there."""
    differences: Differences | None = None
    """Null where the profile decodes plainly, or was not measured."""
    degenerate: str | None = None
    """How many of the target's answers that were recorded are degenerate (``acceptance.degenerate_answers``); null for
    few.
    """
    engine: EngineEvidence | None = None
    """Null where the runtime decodes."""
    backends: list[BackendResult] = Field(default_factory=list)
    """The race between backends; empty where one was tuned alone."""

    def tables(self, decoding: str) -> list[Table]:
        """Arms, gains by task and backends; ``decoding`` is the name of the arm that the profile is."""
        names = [arm.name for arm in self.compared]
        arms = [
            [
                arm.name,
                times(arm.predicted_speedup),
                with_interval(arm.speedup, arm.ci95),
                number(arm.tokens_per_round),
                number(arm.tokens_per_second, 0),
                f"{arm.identical_outputs}/{arm.num_prompts}",
            ]
            for arm in self.compared
        ]
        overs = list(dict.fromkeys(gain.over for gain in self.gains))
        gains = {(gain.task, gain.over): with_interval(gain.speedup, gain.ci95) for gain in self.gains}
        tasks = list(dict.fromkeys(gain.task for gain in self.gains))
        return [
            Table(
                f"Evaluation on {len(self.prompts)} held-out prompts: speedup over plain decoding, with 95 % intervals",
                ["arm", "predicted", "measured", "M", "tokens/s", "same output"],
                arms,
                emphasised=names.index(decoding) if decoding in names else None,
                labels={name: note for name, note in ARM_NOTES.items() if name in [*names, "M"]}
                | {decoding: "this profile"},
            ),
            Table(
                "What tuning gained on held-out prompts, with 95 % intervals",
                ["task", *(f"over {ARM_NOTES.get(over, over)}" for over in overs)],
                [[task, *(gains.get((task, over), "-") for over in overs)] for task in tasks],
                emphasised=tasks.index(ALL) if ALL in tasks else None,
            ),
            backends_table(self.backends),
        ]


class WorkloadReference(Document):
    """The prompts of tuning and evaluation."""

    name: str
    tune_sha256: str
    evaluate_sha256: str
    num_tune_prompts: int
    num_evaluate_prompts: int
    max_new_tokens: int | None = None
    """Limit of every answer, where the search shortened them to keep its budget."""
    temperature: float | None = None
    """Temperature of all prompts, where the search was given one."""


class DecodingProfile(Document, kind="decoding-profile", version=2, made_by="autotune search"):
    """How one target decodes on one device, by one backend."""

    provenance: Provenance
    target: ModelReference
    workload: WorkloadReference
    hardware: Fingerprint
    precision: str
    """Precision of the target's weights: ``float32``, ``bfloat16,int8``, and of a file that an engine loads, ``Q4_1``.
    The fields after it, to ``prefill_threads``, keep their defaults for an engine.
    """
    capture_sizes: tuple[int, ...] = ()
    """Numbers of tokens that inputs are padded to; empty for no padding."""
    mode: str = "eager"
    """How forwards after the prefill run (``autotune.documents.execution.MODES``)."""
    attention_backends: tuple[str, ...] = ()
    """Kernels of scaled dot-product attention that torch chose among on a GPU (``autotune.modeling.attention``)."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads after the prefill; None for torch's default."""
    prefill_threads: int | None = Field(default=None, ge=1)
    """CPU threads of image encoders and prefills; None for torch's default."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the target's chat template, for prompts and requests that do not set them."""
    point: OperatingPoint
    """Decodes every request."""
    evidence: Evidence

    @property
    def backend(self) -> str:
        """The program that decodes: this one, or the engine of the point's deployment."""
        return RUNTIME if self.point.deployment is None else self.point.deployment.backend

    @property
    def content_hash(self) -> str:
        """Hash of the content."""
        return content_key(self.model_dump(mode="json"))

    @property
    def dtype(self) -> str:
        """Data type in which the target is loaded; how its weights are quantized follows it in ``precision``."""
        return self.precision.partition(",")[0]

    def tables(self) -> list[Table]:
        """The evaluation on held-out prompts, what tuning gained by task, how predictions shrank, and the race between
        backends; those that the profile has.
        """
        decoding = AR if self.point.label == "off" else TUNED
        return [table for table in self.evidence.tables(decoding) if table.rows]

    def located(self, source: Path) -> DecodingProfile:
        """The profile with paths in place of the names of models that lie beside its file, ``source``."""
        target = self.target.model_copy(update={"id": beside(source, self.target.id)})
        return self.model_copy(update={"target": target, "point": self.point.located(source)})
