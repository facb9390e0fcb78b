"""Tables of results: a document gives its tables, and the console and the HTML report render them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Text cells in rows. The first column names the rows; the others are figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    details: Collection[str] = ()
    """Columns that only the report and a verbose console show."""
    emphasised: int | None = None
    """Index of the row that stands out."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The meanings of names in the table, which are shown below it."""


def times(ratio: float | None) -> str:
    """A ratio such as a speedup, ``1.57x``; a dash for None and NaN."""
    return "-" if ratio is None or ratio != ratio else f"{ratio:.2f}x"


def with_interval(ratio: float, interval: tuple[float, float]) -> str:
    """A ratio with its interval: ``1.57x (1.46-1.68)``; without it if its ends are equal, as of a single prompt."""
    return times(ratio) if interval[0] == interval[1] else f"{times(ratio)} ({interval[0]:.2f}-{interval[1]:.2f})"


def percent(share: float | None, digits: int = 1) -> str:
    """A share in per cent; a dash for None."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point; a dash for None and NaN."""
    return "-" if value is None or value != value else f"{value:,.{digits}f}"
