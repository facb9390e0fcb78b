"""The decoding profile: what the search finds, with its evidence, and what the runtime obeys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from autotune.documents.condition import Condition, first_match
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.documents.subnet import Subnet
from autotune.files import Document, rename_keys
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import TreePolicy, parse_policy
from autotune.trees.verification import LosslessVerification, Verification

AR, TUNED = "ar", "tuned"
"""Of the arms that a profile is compared with: plain decoding, and the profile itself."""


class DraftChoice(Document):
    """A draft, as a profile names it."""

    kind: str
    id: str
    sha256: str
    subnet: Subnet = Field(default_factory=Subnet)

    @property
    def network(self) -> tuple[Any, ...]:
        """What is loaded for it: points that differ in visual tokens alone share it."""
        return self.id, self.sha256, self.subnet.head_shares, self.subnet.injection_layer


class Predicted(Document):
    """What replay and the cost table say, on the tuning prompts."""

    speedup: float
    ms_per_token: float
    tokens_per_round: float | None
    estimated: bool = False
    """Priced by a datasheet estimate, not by a measured table."""


class Measured(Document):
    """What real runs said, interleaved with plain decoding, on the evaluation prompts."""

    speedup: float
    ci95: tuple[float, float]
    """Paired bootstrap over prompts."""
    tokens_per_round: float | None
    tokens_per_second: float
    ar_tokens_per_second: float
    num_prompts: int
    num_tokens: int
    identical_outputs: int
    """Prompts whose tokens equal plain decoding's."""


class OperatingPoint(Document):
    """One way to decode, and when. ``draft`` and ``tree`` are null for plain autoregressive decoding."""

    when: Condition = Field(default_factory=Condition)
    draft: DraftChoice | None
    tree: TreePolicy | None
    verification: Verification = Field(default_factory=LosslessVerification)
    lossless: bool = True
    fallback: RoundPrice | None = None
    """What a round costs: where rounds do not pay, requests go on by plain steps. Null: they never do."""
    predicted: Predicted | None
    measured: Measured | None

    @model_validator(mode="after")
    def _complete(self) -> OperatingPoint:
        if (self.draft is None) != (self.tree is None):
            raise ValueError("a point has both a draft and a tree, or neither; give both, or null for both")
        if self.lossless != self.verification.is_lossless:
            raise ValueError(
                f"{self.verification.kind} verification is {'' if self.verification.is_lossless else 'not '}lossless; set lossless to {str(self.verification.is_lossless).lower()}"
            )
        return self


class PromptEvidence(Document):
    """The counts of one evaluation prompt under the point that it gets: exact, so a change shows without timing."""

    name: str
    sha256: str
    tokens_sha256: str
    rounds: int
    draft_forwards: int
    accepted_tokens: int
    target_forwards: int | None = None
    """This and the following are null in profiles of earlier versions."""
    plain_steps: int | None = None
    """Target forwards without a draft, each a round as well."""
    verified_nodes: int | None = None
    accepted_lengths: list[int] | None = None
    decode_ms: float
    ar_decode_ms: float


class ComparedArm(Document):
    """An arm that the winner was compared with, in the same run on the same prompts."""

    name: str
    tree: dict[str, Any] | None
    visual_keep: float | None
    predicted_speedup: float | None
    speedup: float
    ci95: tuple[float, float]
    tokens_per_round: float | None
    tokens_per_second: float
    num_prompts: int | None = None
    """That it decoded, the first ones of those that judged the profile; null in profiles of earlier versions: all."""


class Evidence(Document):
    """Why the points are what they are."""

    prompts: list[PromptEvidence] = Field(default_factory=list)
    compared: list[ComparedArm] = Field(default_factory=list)
    """On the evaluation prompts."""
    configurations_replayed: int = 0


class WorkloadReference(Document):
    """The prompts that tuned and judged."""

    name: str
    tune_sha256: str
    evaluate_sha256: str
    num_tune_prompts: int
    num_evaluate_prompts: int


def rename_execution(content: dict[str, Any]) -> None:
    """Migrate how forwards run from its names in profiles of version 1 and cost tables of version 4."""
    rename_keys(content, {"runner": "mode", "buckets": "capture_sizes"})
    if content.get("mode") == "graph":
        content["mode"] = "cuda-graph"


class DecodingProfile(
    Document, kind="decoding-profile", version=2, made_by="autotune search", migrations={1: rename_execution}
):
    """A deployable choice of draft and tree for a target on a device."""

    provenance: Provenance
    target: ModelReference
    workload: WorkloadReference
    hardware: Fingerprint
    precision: str
    capture_sizes: tuple[int, ...] = ()
    """Sizes that forwards are rounded up to; none: every size as it is."""
    mode: str = "eager"
    """How forwards behind the prefills run (``modeling/graph_runner.py``)."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the steps behind the prefills; None: as many as torch uses."""
    points: list[OperatingPoint] = Field(min_length=1)
    """A request is decoded by the first one whose condition it meets."""
    evidence: Evidence

    @field_validator("points")
    @classmethod
    def _each_is_reached(cls, points: list[OperatingPoint]) -> list[OperatingPoint]:
        for number, point in enumerate(points):
            for before, earlier in enumerate(points[:number]):
                if earlier.when.covers(point.when):
                    raise ValueError(
                        f"point {number} is never reached: point {before} comes first and matches every request that it does; put it behind, or drop one of them"
                    )
        if not points[-1].when.covers(Condition()):
            raise ValueError(
                "the last point must match every request; leave its 'when' empty, or add a point (draft and tree null: plain decoding)"
            )
        return points

    @property
    def point(self) -> OperatingPoint:
        """The last point, for requests that meet no other's condition."""
        return self.points[-1]

    def point_for(self, temperature: float, prompt_tokens: int, workload: str | None = None) -> OperatingPoint:
        """The point of a request: the first whose condition it meets."""
        conditions = (point.when for point in self.points)
        number = first_match(conditions, temperature=temperature, prompt_tokens=prompt_tokens, workload=workload)
        return self.points[number]

    @classmethod
    def parse(cls, content: Any, *, source: Path | str) -> DecodingProfile:
        points = cls.upgrade(content, source=source).get("points")
        for number, point in enumerate(points if isinstance(points, list) else []):
            # Named before the union of policies is tried, whose errors would speak of all of them.
            if isinstance(point, dict) and isinstance(point.get("tree"), dict):
                parse_policy(point["tree"], source=f"{source}: points.{number}.tree")
        return super().parse(content, source=source)
