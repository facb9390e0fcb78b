"""Decoding profiles: the operating point that a search found, with the evidence for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, model_validator

from autotune.documents.decoded import Decoded
from autotune.documents.deployment import RUNTIME, BackendResult, Deployment, EngineEvidence
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance, beside
from autotune.documents.subnet import Subnet
from autotune.files import Document, content_key
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import Policy, parse_policy
from autotune.trees.priced import Calibration
from autotune.trees.verification import LosslessVerification, Verification

AR, HF, TUNED = "ar", "hf", "tuned"
"""Names of arms: plain decoding, Hugging Face's ``generate``, and the profile itself."""


class DraftChoice(Document):
    """The draft of an operating point."""

    kind: str
    id: str
    sha256: str
    subnet: Subnet = Field(default_factory=Subnet)

    @property
    def network(self) -> tuple[Any, ...]:
        """Key of the network to load."""
        return self.id, self.sha256, *self.subnet.network


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
    ar_tokens_per_second: float
    num_prompts: int
    num_tokens: int
    identical_outputs: int
    """Number of prompts whose output equals plain decoding."""


class OperatingPoint(Document):
    """A draft and a tree policy, or an engine's deployment. All are null for plain decoding in the runtime."""

    draft: DraftChoice | None
    tree: Policy | None
    deployment: Deployment | None = None
    """The engine that serves the requests, in place of the runtime."""
    verification: Verification = Field(default_factory=LosslessVerification)
    lossless: bool = True
    fallback: RoundPrice | None = None
    """Cost of a round in plain steps: a request whose rounds cost more continues with plain steps. Null: it never does.
    """
    predicted: Predicted | None
    measured: Measured | None

    @model_validator(mode="after")
    def _complete(self) -> OperatingPoint:
        if (self.draft is None) != (self.tree is None):
            raise ValueError("a point has both a draft and a tree, or neither; give both, or null for both")
        if self.lossless != self.verification.is_lossless:
            raise ValueError(
                f"{self.verification.kind} verification is {'' if self.verification.is_lossless else 'not '}lossless; "
                f"set lossless to {str(self.verification.is_lossless).lower()}"
            )
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

    @model_validator(mode="after")
    def _is_calibrated_for_its_draft(self) -> OperatingPoint:
        draft, calibration = self.draft, self.calibration
        if draft is not None and calibration is not None and calibration.draft_sha256 != draft.sha256:
            raise ValueError(
                f"tree.calibration was fitted to the draft {calibration.draft} ({calibration.draft_sha256[:8] or 'no hash'}), and the "
                f"point's draft is {draft.id} ({draft.sha256[:8] or 'no hash'}); run autotune search for this draft"
            )
        return self

    @property
    def label(self) -> str:
        """The decoding method in one line; ``off`` for plain decoding."""
        if self.deployment is not None:
            return self.deployment.label
        return "off" if self.draft is None or self.tree is None else f"{self.tree.policy}, {self.draft.id}"

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of a tree whose policy has one."""
        return getattr(self.tree, "calibration", None)


class ComparedArm(Document):
    """An arm of the run in which the winner was measured."""

    name: str
    tree: dict[str, Any] | None
    visual_keep: float | None
    predicted_speedup: float | None
    speedup: float
    ci95: tuple[float, float]
    tokens_per_round: float | None
    tokens_per_second: float
    num_prompts: int
    """The arm decoded this many of the first evaluation prompts."""


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


class Shrinkage(Document):
    """Speedups of the configuration that decodes by default: predicted where it was chosen, then where it was not.

    The best of many configurations on some prompts is partly the best by chance, so its speedup shrinks on others.
    """

    predicted_on_choosing: float | None
    """On the tuning prompts by which trees were searched. Null, like the next one, without a recorded trace."""
    predicted_on_confirming: float | None
    """On the tuning prompts by which finalists were chosen and measured; these prompts did not choose trees."""
    measured_on_confirming: float
    measured_on_held_out: float
    num_runs: int | None = None
    """Runs on confirming prompts by which the configuration was chosen; null in older profiles."""


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
    plain_ms: list[float] = Field(default_factory=list)
    """Decoding times of plain decoding on the same prompts, in milliseconds."""
    compared: list[ComparedArm] = Field(default_factory=list)
    configurations_replayed: int = 0
    best_default: str | None = None
    """The published default that was fastest on held-out prompts; null where none was measured, as the shrinkage below.
    """
    gains: list[Gain] = Field(default_factory=list)
    shrinkage: Shrinkage | None = None
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
    backend: str = RUNTIME
    """The program that decodes: this one, or the engine of the point's deployment."""
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

    @model_validator(mode="after")
    def _is_calibrated_on_its_prompts(self) -> DecodingProfile:
        fit = self.point.calibration
        if fit is not None and fit.workload_sha256 != self.workload.tune_sha256:
            raise ValueError(
                f"point.tree.calibration was fitted to other prompts ({fit.workload_sha256[:8]}) than those that the profile "
                f"is tuned for ({self.workload.tune_sha256[:8]}); run autotune search on these prompts"
            )
        return self

    @model_validator(mode="after")
    def _is_of_its_backend(self) -> DecodingProfile:
        backend = self.point.deployment.backend if self.point.deployment else RUNTIME
        if backend != self.backend:
            raise ValueError(f"the point is decoded by {backend}, and the profile's backend is {self.backend}")
        return self

    @property
    def content_hash(self) -> str:
        """Hash of the content."""
        return content_key(self.model_dump(mode="json"))

    @property
    def dtype(self) -> str:
        """Data type in which the target is loaded; how its weights are quantized follows it in ``precision``."""
        return self.precision.partition(",")[0]

    def located(self, source: Path) -> DecodingProfile:
        """The profile with paths in place of the names of models that lie beside its file, ``source``."""
        target = self.target.model_copy(update={"id": beside(source, self.target.id)})
        return self.model_copy(update={"target": target, "point": self.point.located(source)})

    @classmethod
    def parse(cls, content: Any, *, source: Path | str) -> DecodingProfile:
        point = cls.without_schema(content, source=source).get("point")
        if isinstance(point, dict) and isinstance(point.get("tree"), dict):
            # First, because errors of the union type would name the fields of every policy.
            parse_policy(point["tree"], source=f"{source}: point.tree")
        return super().parse(content, source=source)
