"""Loads in a profile: requests that an engine serves at once, in a closed loop of clients, each of which sends its next
request when the last one ended. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from autotune.documents.speculation import Natural
from autotune.files import Document
from autotune.table import Table, percent, with_interval

Figure = tuple[float, float, float]
"""An estimate, and the ends of its 95 % interval by bootstrap over requests."""
Schedule = list[tuple[Natural, Natural, Natural]]
"""First and last number of requests at once, and the depth for them."""


class LoadRun(Document):
    """A load that a server was given, as the clients have measured it."""

    label: str
    at_once: int = Field(ge=1)
    """Clients."""
    tokens: list[float] = Field(default_factory=list)
    """Tokens of every request, in the order in which they were sent, while all clients were busy."""
    seconds: list[float] = Field(default_factory=list)
    """The same for their time, prompts included."""
    latencies: list[list[float]] = Field(default_factory=list)
    """For each request that began while all clients were busy: milliseconds to the first token and from it to the last
    one, and the number of tokens after the first.
    """
    identical: int = 0
    """Requests with plain decoding's answer, one request at a time."""
    hit_rate: float | None = None
    """Share of the prompts' tokens that were in the prefix cache; null where the engine does not say. A prompt that is
    sent again finds none of its former tokens there.
    """
    failure: str = ""
    """Why the server does not hold this load; empty where it does."""


class ServedLoad(Document):
    """Settings under a load, while all clients were busy."""

    label: str
    requests: int = Field(ge=1)
    tokens_per_second: Figure
    """The throughput of all clients."""
    first_token_ms: Figure
    """Mean time to the first token (TTFT)."""
    token_ms: Figure
    """Mean time per output token after the first (TPOT)."""
    p95_ms: tuple[float, float]
    """The 95th percentiles of both over requests."""
    hit_rate: float | None
    """As in ``LoadRun``."""
    identical: int
    """As in ``LoadRun``."""


class LoadResult(Document):
    """The best depth for a number of requests at once."""

    at_once: int = Field(ge=1)
    depth: Natural
    """The most tokens of a draft; 0: off."""
    depths: list[Natural]
    """The depths that were measured."""
    chosen: ServedLoad
    off: ServedLoad
    """Without speculation."""
    ratio: Figure
    """Throughput of the chosen over that of off."""


def loads_table(loads: Sequence[LoadResult]) -> Table:
    """The chosen settings for each load, and no speculation below them."""
    rows = [
        [
            f"{result.at_once}: {served.label}",
            _figure(served.tokens_per_second),
            with_interval(ratio[0], ratio[1:]),
            _figure(served.first_token_ms),
            _figure(served.token_ms, 1),
            percent(served.hit_rate, 0),
            f"{served.identical}/{served.requests}",
        ]
        for result in loads
        for served, ratio in {
            result.chosen.label: (result.chosen, result.ratio),
            result.off.label: (result.off, (1.0, 1.0, 1.0)),
        }.values()
    ]
    columns = ["requests: settings", "tokens/s", "of off", "TTFT, ms", "TPOT, ms", "prefix hits", "same output"]
    return Table("Requests at once, with 95 % intervals", columns, rows)


def _figure(figure: Figure, digits: int = 0) -> str:
    return "{} ({}-{})".format(*(f"{value:,.{digits}f}" for value in figure))
