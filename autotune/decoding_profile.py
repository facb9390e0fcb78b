"""The decoding profile: what the search finds, with its evidence, and what the runtime obeys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from autotune.condition import Condition, first_match
from autotune.cost.device import Fingerprint
from autotune.errors import NotComparable, UserError
from autotune.files import Document, check_schema, parse, read_json, write_document
from autotune.provenance import ModelReference, Provenance
from autotune.subnet import Subnet
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


class DecodingProfile(Document):
    """A deployable choice of draft and tree for a target on a device."""

    provenance: Provenance
    target: ModelReference
    workload: WorkloadReference
    hardware: Fingerprint
    precision: str
    buckets: tuple[int, ...] = ()
    """Sizes that forwards are rounded up to; none: every size as it is."""
    runner: str = "eager"
    """How forwards behind the prefills run (``runtime/graphs.py``)."""
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


def save_profile(path: Path, profile: DecodingProfile) -> None:
    """Write the profile atomically."""
    write_document(path, "decoding-profile", profile)


def load_profile(path: Path) -> DecodingProfile:
    """The profile in ``path``.

    Raises:
        UserError: missing, truncated, unknown key, newer schema, unknown tree policy.
    """
    content = read_json(path)
    points = check_schema("decoding-profile", content, source=path).get("points")
    for number, point in enumerate(points if isinstance(points, list) else []):
        # Named before the union of policies is tried, whose errors would speak of all of them.
        if isinstance(point, dict) and isinstance(point.get("tree"), dict):
            parse_policy(point["tree"], source=f"{path}: points.{number}.tree")
    return parse(DecodingProfile, "decoding-profile", content, source=path)


def load(
    profile: str | Path | DecodingProfile,
    *,
    target: Any = None,
    draft: Any = None,
    device: str = "auto",
    strict: bool = False,
) -> Any:
    """A decoder that obeys a profile.

    Loads the target and draft that the profile names, or takes loaded models. On another device than the profile was
    made for it says so in a warning and decodes anyway, for that is lossless all the same. What the points need is loaded
    here, each draft once, so that the decoder switches between them at no cost.

    Raises:
        UserError: the profile or its models cannot be read; a draft given for points that name several; with ``strict``,
            another device.
        NotComparable: a model's weights are not those of the profile (models given by the caller are not hashed).
    """
    import warnings

    from autotune.cost.device import choose_device, fingerprint
    from autotune.drafters.checkpoint import load_draft
    from autotune.models import load_model, load_processor, reference
    from autotune.runtime.target import Target
    from autotune.runtime.way import as_draft

    source = "profile" if isinstance(profile, DecodingProfile) else str(profile)
    document = profile if isinstance(profile, DecodingProfile) else load_profile(Path(profile))
    networks = {point.draft.network: point.draft for point in document.points if point.draft is not None}
    if draft is not None and len(networks) > 1:
        raise UserError(
            f"{source}: its points name {len(networks)} drafts; leave draft= out, and they are loaded by name"
        )
    place = choose_device(device) if target is None else str(target.device)
    here = fingerprint(place)
    if here.key != document.hardware.key:
        message = f"{source}: tuned on {document.hardware.key}, this is {here.key}"
        if strict:
            raise UserError(f"{message}; run autotune search here, or load without strict=True")
        warnings.warn(f"{message}; output is the same, the speedup may differ", stacklevel=2)

    @functools.cache
    def checked(reference_in_profile: ModelReference) -> str:
        found = reference(reference_in_profile.id)
        if reference_in_profile.sha256 and found.sha256 and found.sha256 != reference_in_profile.sha256:
            raise NotComparable(
                f"{source}: {reference_in_profile.id} has other weights than when the profile was made; run autotune search again"
            )
        return reference_in_profile.id

    runner = Target(load_model(checked(document.target), device=place) if target is None else target)
    drafts = {
        network: load_draft(checked(ModelReference(id=choice.id, sha256=choice.sha256)), runner, choice.subnet)
        if draft is None
        else as_draft(draft)
        for network, choice in networks.items()
    }
    processor = None
    if target is None or Path(getattr(target.config, "_name_or_path", "") or "?").exists():
        processor = load_processor(document.target.id if target is None else target.config._name_or_path)
    return decoder_for(
        document,
        runner,
        lambda choice: drafts[choice.network],
        processor=processor,
        threads=document.threads if here.key == document.hardware.key else None,
    )


def decoder_for(
    profile: DecodingProfile,
    target: Any,
    draft_of: Callable[[DraftChoice], Any],
    *,
    processor: Any = None,
    threads: int | None = None,
) -> Any:
    """A decoder that obeys a profile, of loaded models."""
    from autotune.runtime.decoder import Decoder
    from autotune.runtime.way import Way

    return Decoder(
        target,
        ways=[
            Way(
                None if point.draft is None else draft_of(point.draft),
                tree=point.tree,
                visual_keep=1.0 if point.draft is None else point.draft.subnet.visual_keep,
                verification=point.verification,
                fallback=point.fallback,
                when=point.when,
            )
            for point in profile.points
        ],
        buckets=profile.buckets,
        runner=profile.runner,
        threads=threads,
        processor=processor,
        profile=profile,
    )
