"""The profile of a serving engine: its own speculation settings, with the counts and prices behind them. Loads no torch."""

from __future__ import annotations

import shlex
from typing import Literal

from pydantic import Field, model_validator

from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document

NgramType = Literal["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"]
OPTIONS: dict[NgramType, dict[str, int]] = {
    "ngram-simple": {"size-n": 12, "size-m": 48},
    "ngram-map-k": {"size-n": 12, "size-m": 48},
    "ngram-map-k4v": {"size-n": 12, "size-m": 48, "min-hits": 1},
    "ngram-mod": {"n-match": 24, "n-min": 48, "n-max": 64},
    "ngram-cache": {},
}
"""The options that change a type's drafts, with llama-server's defaults, in the order of priority in which a server of several
types asks them for a draft."""


class Speculation(Document):
    """One type of llama.cpp's n-gram speculation, with all of its options by their names without ``--spec-TYPE-``."""

    type: NgramType
    options: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_its_options(self) -> Speculation:
        if list(self.options) != list(OPTIONS[self.type]):
            raise ValueError(f"{self.type} has the options {', '.join(OPTIONS[self.type]) or 'none'}")
        if any(value < (name != "n-min") or value > 1024 for name, value in self.options.items()):
            raise ValueError("options are 1 to 1024, and n-min may be 0")
        return self

    @property
    def label(self) -> str:
        values = ",".join(map(str, self.options.values()))
        return f"{self.type}({values})" if values else self.type


def arguments_of(speculations: list[Speculation]) -> list[str]:
    """Arguments of llama-server for one or several types; no arguments switch speculation off."""
    words = ["--spec-type", ",".join(one.type for one in speculations)] if speculations else []
    for one in speculations:
        for name, value in one.options.items():
            words += [f"--spec-{one.type}-{name}", str(value)]
    return words


class SpeculationCounts(Document):
    """Work of one request, or of several: verifications of drafts, their draft tokens, and the accepted ones."""

    verifications: int = Field(ge=0)
    drafted: int = Field(ge=0)
    accepted: int = Field(ge=0)


class ServedAnswer(Document):
    """A greedy answer of the engine, as tokens."""

    prompt_tokens: list[int] = Field(min_length=1)
    tokens: list[int] = Field(min_length=1)
    limit: int = Field(ge=1)
    """``n_predict`` of the request."""
    is_ended: bool
    """Whether the last token is one that ends the generation."""
    task: str = "prompt"


class CountedAnswer(Document):
    """An answer of a new server with the profile's checked settings, and the counts that the server reported."""

    answer: ServedAnswer
    counts: SpeculationCounts


class PricedStep(Document):
    """Time of one forward pass of the engine over ``tokens`` tokens of one request with ``context`` tokens before them."""

    tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    wall_ms: list[float] = Field(min_length=1)
    cpu_ms: list[float] = Field(min_length=1)


class ConfirmedArm(Document):
    """Settings that were measured in turns with the engine without speculation, on held-out prompts."""

    label: str
    speculation: Speculation | None
    predicted: float
    """Speedup by replay and prices; 1 for plain decoding."""
    measured: float
    ci95: tuple[float, float]
    clock: Literal["wall", "cpu"]
    """Clock of the speedup: CPU time where it disagrees with wall time, because other processes used the machine."""
    tokens_per_step: float
    counts: SpeculationCounts
    exact: int
    """Prompts whose counts are those of the replay."""
    identical: int
    """Prompts with plain decoding's answer."""
    prompts: int


class EngineProfile(Document, kind="engine-profile", made_by="autotune search --engine llama.cpp"):
    """The fastest speculation settings of one engine for a model, a workload and a machine; or that it should be off."""

    provenance: Provenance
    engine: Literal["llama.cpp"]
    build: str
    """SHA-256 of the engine's executable and libraries; what the server says of itself where it was not started here."""
    target: ModelReference
    arguments: list[str]
    """Arguments of every server, besides the model and the speculation."""
    command: list[str]
    """Command that starts the engine as recommended."""
    speculation: Speculation | None
    """The recommended settings; None: leave speculation off."""
    verdict: str
    workload: str
    workload_sha256: str
    hardware: Fingerprint
    context: int
    """Context of a slot, in tokens."""
    is_confirmed: bool
    left_out: dict[str, str]
    """Types whose counts differ from the replay's or that the build does not have, with the reason."""
    prices: list[PricedStep]
    price_factor: float
    """Time of verifications in served requests over the prices' own."""
    arms: list[ConfirmedArm]
    checked: Speculation
    """Settings of ``answers``: the recommended ones, or the fastest ones that were tried."""
    answers: list[CountedAnswer]
    """The first answers of a new server, in their order."""

    @property
    def shown_command(self) -> str:
        return shlex.join(self.command)
