"""The profile of a serving engine: its own speculation settings, with the counts and prices behind them. Loads no
torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from autotune.documents.deployment import PricedStep as PricedStep
from autotune.documents.deployment import ServedLoad as ServedLoad
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.documents.speculation import OPTIONS as OPTIONS
from autotune.documents.speculation import TYPES as TYPES
from autotune.documents.speculation import EngineName as EngineName
from autotune.documents.speculation import Milliseconds as Milliseconds
from autotune.documents.speculation import ModelType as ModelType
from autotune.documents.speculation import Natural as Natural
from autotune.documents.speculation import Options as Options
from autotune.documents.speculation import Speculation as Speculation
from autotune.documents.speculation import SpeculationType as SpeculationType
from autotune.files import Document

Clock = Literal["wall", "cpu"]


class SpeculationCounts(Document):
    """Verifications of drafts, their draft tokens, and the accepted ones."""

    verifications: Natural
    drafted: Natural
    accepted: Natural

    @property
    def text(self) -> str:
        return f"{self.verifications} verifications, {self.drafted} drafted, {self.accepted} accepted"


class ServedAnswer(Document):
    """A greedy answer of the engine, with its own counts of draft tokens and its time from the first token to
    the last.
    """

    prompt_tokens: list[Natural] = Field(min_length=1)
    tokens: list[Natural] = Field(min_length=1)
    limit: int = Field(ge=1)
    """The most tokens that the request asked for."""
    is_ended: bool = False
    """Whether the last token ends the generation."""
    beyond: list[Natural] = Field(default_factory=list)
    """Tokens that greedy decoding gives after the end, of an engine whose drafts reach there."""
    rounds: list[tuple[Natural, Natural]] = Field(default_factory=list)
    """Draft tokens and accepted ones of every verification, in a server whose draft model drafts before each pass."""
    drafted: Natural = 0
    accepted: Natural = 0
    wall_ms: Milliseconds = 0.0
    cpu_ms: Milliseconds = 0.0
    """CPU time of the server's threads; 0 if they are not on this machine."""

    @model_validator(mode="after")
    def _is_possible(self) -> ServedAnswer:
        if len(self.tokens) > self.limit or self.accepted > self.drafted:
            raise ValueError("an answer is no longer than its limit, and accepts no more tokens than are drafted")
        return self


class ConfirmedArm(Document):
    """Settings that were measured in turns with the engine without speculation, on held-out prompts."""

    label: str
    speculation: Speculation | None
    predicted: float
    """Speedup by replay and prices."""
    measured: float
    ci95: tuple[float, float]
    clock: Clock
    tokens_per_step: float
    replayed: SpeculationCounts
    counts: SpeculationCounts
    """Counted by the engine; ``replayed`` are the predicted ones."""
    exact: int | None
    """Prompts whose counts are the replay's; None with a draft model, whose chain is replayed from its own rounds."""
    identical: int
    """Prompts with plain decoding's answer."""
    prompts: int
    timed: int
    """Prompts that the speedups are of; in the others another process disturbed a request."""


class PredictedSettings(Document):
    """The speedup of settings over no speculation by replay and prices, pooled over the tuning prompts, with a
    bootstrap interval.
    """

    speculation: Speculation
    speedup: float
    ci95: tuple[float, float]


class EngineProfile(Document, kind="engine-profile", version=6, made_by="autotune search --engine"):
    """The fastest speculation settings of one engine for a model, a workload and a machine; or that it should
    be off.
    """

    provenance: Provenance
    engine: EngineName
    build: str
    """SHA-256 of the engine's executable and libraries, or what a server says of itself."""
    target: ModelReference
    arguments: list[str]
    """Arguments of every server, besides the model and the speculation."""
    command: list[str]
    """Starts the engine as recommended."""
    speculation: Speculation | None
    """The recommended settings; None: leave speculation off."""
    workload: str
    workload_sha256: str
    hardware: Fingerprint
    context: int = Field(ge=1)
    """Most tokens of a request."""
    left_out: dict[SpeculationType, str]
    """Types that the build does not have, or whose counts are not the replay's, with the reason."""
    num_replayed: dict[SpeculationType, int]
    """Settings of each type that were replayed."""
    fastest: list[PredictedSettings] = Field(min_length=1)
    """The fastest three of each type, and its default."""
    prices: list[PricedStep] = Field(min_length=1)
    price_factor: float
    """Time of verifications in served requests over the prices' own."""
    step_factor: float
    """The same of passes over one token."""
    plain_factor: float
    """Time of passes without speculation over theirs, in an engine that runs another loop then; else 1."""
    draft_ms: tuple[float, float]
    """Time of a draft model for a verification, and for each draft token; 0 without one."""
    arms: list[ConfirmedArm]
    """Empty where a server that ran was not to be started anew."""
    loads: list[ServedLoad]
    """Empty unless ``--requests-at-once`` asked for them."""
    checked: Speculation
    """Settings of ``answers``: the recommended ones, or those of the tried that drafted most."""
    answers: list[ServedAnswer]
    """The first answers of a new server, in their order."""
    counts: SpeculationCounts
    """Totals of ``answers``."""
