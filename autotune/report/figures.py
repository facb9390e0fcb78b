"""The report's plots, as SVG. Each takes numbers and draws them; what the numbers are is ``findings.py``'s and its neighbours'
business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.report.svg import DASHES, INK, MARKERS, MUTED, SERIES, STYLE, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.4  # inches: narrow enough that its text can be read on a phone


class Bar(NamedTuple):
    """A measured value with its interval."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    is_strong: bool = False


class Line(NamedTuple):
    """Points that belong together."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@contextmanager
def _figure(height: float) -> Iterator[tuple[Figure, Axes]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.subplots()


def intervals(name: str, bars: Sequence[Bar], axis: str, description: str) -> str:
    """A row for each value: a point with its interval, the strong ones filled; a line at 1."""
    with _figure(0.75 + 0.3 * len(bars)) as (figure, axes):
        for row, bar in enumerate(bars):
            low, high = bar.interval or (bar.value, bar.value)
            colour = SERIES[0] if bar.is_strong else MUTED
            axes.plot(
                [low, high], [row, row], color=colour, linewidth=2.4 if bar.is_strong else 1.6, solid_capstyle="butt"
            )
            fill = colour if bar.is_strong else "none"
            axes.plot(
                [bar.value], [row], "D" if bar.is_strong else "o", color=colour, markerfacecolor=fill, markersize=6
            )
            axes.annotate(
                f"{bar.value:.2f}x", (high, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5
            )
        axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.12, y=0.08)
        axes.set_xlabel(axis)
        return to_svg(figure, name, description)


def predicted_against_measured(name: str, groups: Mapping[str, Sequence[tuple[float, Bar]]], description: str) -> str:
    """Points (measured with its interval, predicted); on the dashed line both are equal."""
    with _figure(3.6) as (figure, axes):
        ends: list[float] = []
        for number, (label, points) in enumerate(groups.items()):
            colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
            for place, (predicted, bar) in enumerate(points):
                low, high = bar.interval or (bar.value, bar.value)
                ends += [predicted, low, high]
                axes.plot([low, high], [predicted, predicted], color=colour, linewidth=1, alpha=0.6)
                axes.plot([bar.value], [predicted], marker, color=colour, markersize=6, label=None if place else label)
                if bar.label:
                    axes.annotate(
                        bar.label, (bar.value, predicted), xytext=(4, 5), textcoords="offset points", fontsize=8
                    )
        low, high = 0.95 * min(ends), 1.05 * max(ends)
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(xlim=(low, high), ylim=(low, high), xlabel="measured speedup", ylabel="predicted speedup")
        axes.legend(loc="upper left")
        return to_svg(figure, name, description)


def lines(
    name: str,
    found: Sequence[Line],
    *,
    x: str,
    y: str,
    description: str,
    log: bool = False,
    from_zero: bool = False,
    whole_x: bool = False,
    dashed_line: float | None = None,
    height: float = 3.2,
) -> str:
    """Lines with a mark at every point."""
    with _figure(height) as (figure, axes):
        for number, line in enumerate(found):
            axes.plot(
                line.x,
                line.y,
                label=line.label,
                color=SERIES[number % len(SERIES)],
                marker=MARKERS[number % len(MARKERS)],
                linestyle=DASHES[number % len(DASHES)],
                linewidth=1.5,
                markersize=4.5,
            )
        if dashed_line is not None:
            axes.axhline(dashed_line, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        if log:
            axes.set_xscale("log", base=2)
            ticks = [2**i for i in range(9) if 2**i <= 1.05 * max(max(line.x) for line in found)]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
        if from_zero:
            axes.set_ylim(0, 1.07 * max(max(line.y) for line in found))
        if whole_x:
            axes.set_xticks(range(1, 1 + int(max(max(line.x) for line in found))))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if len(found) > 1:
            axes.legend(loc="best")
        return to_svg(figure, name, description)


def front(
    name: str, clouds: Sequence[Line], best: Line, *, x: str, y: str, description: str, labels: Sequence[str] = ()
) -> str:
    """Marks by kind, and the front that nothing beats as a stepped line."""
    with _figure(3.4) as (figure, axes):
        axes.step(best.x, best.y, where="post", color=INK, linewidth=1.2, label=best.label, zorder=1)
        for number, cloud in enumerate(clouds):
            axes.plot(
                cloud.x,
                cloud.y,
                MARKERS[number % len(MARKERS)],
                color=SERIES[number % len(SERIES)],
                markersize=4.5,
                label=cloud.label,
                zorder=2,
            )
        for label, px, py in zip(labels, best.x, best.y, strict=False):
            axes.annotate(label, (px, py), xytext=(4, 5), textcoords="offset points", fontsize=8)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.legend(loc="best")
        return to_svg(figure, name, description)


def paired_bars(name: str, rows: Mapping[str, Mapping[str, float]], axis: str, description: str) -> str:
    """A group of bars for each row, one for each kind; kinds differ in colour and hatching."""
    kinds = list(dict.fromkeys(kind for shares in rows.values() for kind in shares))
    with _figure(0.9 + 0.34 * len(rows)) as (figure, axes):
        thickness = 0.8 / len(kinds)
        for number, kind in enumerate(kinds):
            places = np.arange(len(rows)) + (number - (len(kinds) - 1) / 2) * thickness
            axes.barh(
                places,
                [shares.get(kind, 0.0) for shares in rows.values()],
                height=thickness,
                label=kind,
                color=SERIES[number] if number == 0 else "none",
                edgecolor=SERIES[number],
                linewidth=1.1,
            )
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(axis)
        if len(kinds) > 1:
            axes.legend(loc="lower right")
        return to_svg(figure, name, description)


def steps(name: str, values: Mapping[str, float], axis: str, description: str) -> str:
    """Horizontal bars of growing values, each with its number, from 1 on."""
    with _figure(0.75 + 0.32 * len(values)) as (figure, axes):
        rows: Any = np.arange(len(values))
        found = list(values.values())
        axes.barh(rows, [value - 1 for value in found], left=1.0, height=0.62, color=SERIES[0], alpha=0.85)
        for row, value in zip(rows, found, strict=True):
            axes.annotate(
                f"{value:.2f}x", (value, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5
            )
        axes.set_yticks(rows, list(values))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.14)
        axes.set_xlabel(axis)
        return to_svg(figure, name, description)
