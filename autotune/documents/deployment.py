"""Backends in a profile: the engine that serves requests, the evidence for its settings, and the race between backends.
Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pydantic import Field

from autotune.documents.loads import LoadResult, Schedule
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import Milliseconds, Speculation
from autotune.files import Document
from autotune.table import Table, number, percent, with_interval

RUNTIME = "runtime"
"""Name of the backend that decodes in this program."""


class Deployment(Document):
    """An engine that serves the requests of an operating point."""

    backend: str
    model: ModelReference
    """The model that the engine loads."""
    command: list[str] = Field(min_length=1)
    """Starts the engine as recommended, speculation included, without a port."""
    arguments: list[str] = Field(default_factory=list)
    """The user's own arguments, which every server of the search had."""
    speculation: Speculation | None
    """None: speculation is off."""
    build: str
    """Hash of the engine's executable and libraries, or what a server says of itself."""

    @property
    def label(self) -> str:
        return "off" if self.speculation is None else self.speculation.label


class PricedStep(Document):
    """Times of a forward pass over ``tokens`` tokens of a request after ``context`` tokens."""

    tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    wall_ms: list[Milliseconds] = Field(min_length=1)
    cpu_ms: list[Milliseconds] = Field(min_length=1)


class PredictedSettings(Document):
    """Speedup of a configuration over plain decoding by replay and prices, pooled over the tuning prompts."""

    label: str
    type: str
    is_default: bool
    speedup: float
    ci95: tuple[float, float]
    """Bootstrap over prompts."""

    @property
    def title(self) -> str:
        """The label, marked where the settings are the default of their type."""
        return f"{self.label}, default" if self.is_default else self.label


class EngineEvidence(Document):
    """Replays, prices and loads behind an engine's settings."""

    num_replayed: dict[str, int]
    """Configurations of each type that were replayed."""
    predicted: list[PredictedSettings]
    """All of them, the fastest first."""
    prices: list[PricedStep] = Field(default_factory=list)
    factors: dict[str, float] = Field(default_factory=dict)
    """Times of passes in a server that speculates over those of a plain one, by kind of pass."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Types that the build does not have, or whose counts are not the replay's, with the reason."""
    as_predicted: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """For every finalist by label: tuning prompts whose counts in the engine are the replay's, and all."""
    loads: list[LoadResult] = Field(default_factory=list)
    """Empty unless ``--load`` asked for them."""
    schedule: Schedule = Field(default_factory=list)
    """The best depths for numbers of requests at once, between the loads and beyond them, whether or not the engine can
    be given them; empty without loads.
    """

    def tables(self) -> list[Table]:
        """Replayed settings, and prices of forward passes."""
        settings = [
            [
                settings.title,
                settings.type,
                str(self.num_replayed.get(settings.type, 0)),
                with_interval(settings.speedup, settings.ci95),
            ]
            for settings in self.predicted
        ]
        prices = [
            [
                str(step.tokens),
                f"{step.context} tokens",
                number(median(step.wall_ms), 1),
                number(median(step.cpu_ms), 1),
            ]
            for step in sorted(self.prices, key=lambda step: (step.context, step.tokens))
        ]
        factors = {
            name: f"{number(factor)} times as long in a server that speculates" for name, factor in self.factors.items()
        }
        return [
            Table(
                "The fastest three replayed settings of each type, and its default",
                ["settings", "type", "replayed", "predicted"],
                settings,
                labels={name: f"left out, {reason}" for name, reason in self.left_out.items()},
            ),
            Table("Prices of forward passes", ["tokens", "after", "wall, ms", "CPU, ms"], prices, labels=factors),
        ]


class BackendResult(Document):
    """A backend's best configuration in the race between backends, on held-out prompts."""

    backend: str
    model: ModelReference
    precision: str = ""
    """The precision of the weights: ``float32``, ``bfloat16``, ``Q4_1``."""
    label: str = ""
    """The configuration; ``off`` for plain decoding."""
    seconds: float = 0.0
    """Time in which the backend decoded the prompts that all backends decoded."""
    speedup: float = 0.0
    """Over plain decoding in the deployed backend."""
    ci95: tuple[float, float] = (0.0, 0.0)
    num_prompts: int = 0
    agreement: float = 0.0
    """Mean share of an answer's tokens before the first that differs from the first backend's with the target's own
    weights.
    """
    has_own_weights: bool = False
    """Whether the weights are the target's, at its precision."""
    is_deployed: bool = False
    is_slower: bool = False
    """Whether it competed for the deployment and was significantly slower than the deployed one."""
    failure: str = ""
    """Why the backend is not in the race; empty for one that was. Its figures are 0 then."""


def backends_table(backends: Sequence[BackendResult]) -> Table:
    """The race between backends, with the reason for which one was not in it."""
    rows = [
        [
            result.backend,
            f"{result.model.id}, {result.precision}" + ("" if result.has_own_weights else ", another model"),
            *(
                [result.failure, "-", "-", "-"]
                if result.failure
                else [
                    result.label,
                    number(result.seconds, 1),
                    with_interval(result.speedup, result.ci95),
                    percent(result.agreement),
                ]
            ),
        ]
        for result in backends
    ]
    return Table(
        f"Backends on {max((result.num_prompts for result in backends), default=0)} held-out prompts",
        ["backend", "model", "configuration", "seconds", "speedup", "agreement"],
        rows,
        emphasised=next((place for place, result in enumerate(backends) if result.is_deployed), None),
    )
