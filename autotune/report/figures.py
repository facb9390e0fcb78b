"""Chart types of the report, as SVG. Each draws the numbers that it is given; ``plots.py`` collects them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autotune.report.svg import DASHES, INK, MARKERS, MUTED, SERIES, STYLE, to_svg

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.4  # inches: readable on a phone
MAX_LABEL = 46  # letters of a legend entry that fit the width


class Bar(NamedTuple):
    """A measured value with its interval."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    is_strong: bool = False


class Line(NamedTuple):
    """A labelled series of points."""

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


def _rows(axes: Axes, labels: Sequence[str], xlabel: str) -> None:
    """One horizontal row per label, from top to bottom."""
    axes.set_yticks(range(len(labels)), list(labels))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)


def _value_label(axes: Axes, value: float, x: float, row: float) -> None:
    axes.annotate(f"{value:.2f}x", (x, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend below the axes, where it covers nothing; long labels are cut in the middle."""
    handles, labels = axes.get_legend_handles_labels()
    half = MAX_LABEL // 2
    shown = [label if len(label) <= MAX_LABEL else f"{label[:half]}…{label[1 - half :]}" for label in labels]
    longest = max(map(len, shown))
    columns = 1 if longest > 24 else 2 if longest > 12 else 3
    figure.legend(handles, shown, loc="outside lower center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(shown) // columns))


def intervals(name: str, bars: Sequence[Bar], xlabel: str, description: str) -> str:
    """A row for each value with its interval, strong ones filled; a dashed line at 1."""
    with _figure(0.75 + 0.3 * len(bars)) as (figure, axes):
        for row, bar in enumerate(bars):
            low, high = bar.interval or (bar.value, bar.value)
            colour = SERIES[0] if bar.is_strong else MUTED
            width, marker = (2.4, "D") if bar.is_strong else (1.6, "o")
            fill = colour if bar.is_strong else "none"
            axes.plot([low, high], [row, row], color=colour, linewidth=width, solid_capstyle="butt")
            axes.plot([bar.value], [row], marker, color=colour, markerfacecolor=fill, markersize=6)
            _value_label(axes, bar.value, high, row)
        axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        _rows(axes, [bar.label for bar in bars], xlabel)
        axes.margins(x=0.14, y=0.08)
        return to_svg(figure, name, description)


def predicted_against_measured(name: str, groups: Mapping[str, Sequence[tuple[float, Bar]]], description: str) -> str:
    """Points of (predicted, measured with its interval); both are equal on the dashed line."""
    with _figure(3.6) as (figure, axes):
        ends: list[float] = []
        for number, (label, points) in enumerate(groups.items()):
            colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
            for index, (predicted, bar) in enumerate(points):
                low, high = bar.interval or (bar.value, bar.value)
                ends += [predicted, low, high]
                axes.plot([low, high], [predicted, predicted], color=colour, linewidth=1, alpha=0.6)
                axes.plot([bar.value], [predicted], marker, color=colour, markersize=6, label=None if index else label)
                # Labels alternate above and below, because predictions of finalists are close to each other.
                offset = (4, 5) if index % 2 == 0 else (4, -12)
                axes.annotate(bar.label, (bar.value, predicted), offset, textcoords="offset points", fontsize=8)
        low, high = 0.95 * min(ends), 1.05 * max(ends)
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(xlim=(low, high), ylim=(low, high), xlabel="measured speedup", ylabel="predicted speedup")
        _legend(figure, axes)
        return to_svg(figure, name, description)


def lines(
    name: str,
    series: Sequence[Line],
    *,
    x: str,
    y: str,
    description: str,
    log: bool = False,
    integer_x: bool = False,
    dashed_line: float | None = None,
    height: float = 3.2,
) -> str:
    """Lines with a marker at every point, from zero."""
    max_x = max(max(line.x) for line in series)
    with _figure(height) as (figure, axes):
        for number, line in enumerate(series):
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
            ticks = [2**i for i in range(9) if 2**i <= 1.05 * max_x]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
        if integer_x:
            axes.set_xticks(range(1, 1 + int(max_x)))
        axes.set_ylim(0, 1.07 * max(max(line.y) for line in series))
        axes.set(xlabel=x, ylabel=y)
        if len(series) > 1:
            _legend(figure, axes)
        return to_svg(figure, name, description)


def front(name: str, clouds: Sequence[Line], best: Line, *, x: str, y: str, description: str) -> str:
    """Points by series, and the Pareto front as a stepped line."""
    with _figure(3.2) as (figure, axes):
        axes.step(best.x, best.y, where="post", color=INK, linewidth=1.2, label=best.label, zorder=1)
        for number, cloud in enumerate(clouds):
            marker, colour = MARKERS[number % len(MARKERS)], SERIES[number % len(SERIES)]
            axes.plot(cloud.x, cloud.y, marker, color=colour, markersize=4.5, label=cloud.label, zorder=2)
        axes.set(xlabel=x, ylabel=y)
        _legend(figure, axes)
        return to_svg(figure, name, description)


def grouped_bars(name: str, values: pd.DataFrame, xlabel: str, description: str) -> str:
    """A group of bars for each row, one for each column; columns differ in colour and filling."""
    with _figure(0.9 + 0.34 * len(values)) as (figure, axes):
        thickness = 0.8 / len(values.columns)
        for number, column in enumerate(values):
            rows = np.arange(len(values)) + (number - (len(values.columns) - 1) / 2) * thickness
            fill = SERIES[number] if number == 0 else "none"
            axes.barh(
                rows, values[column], thickness, label=column, color=fill, edgecolor=SERIES[number], linewidth=1.1
            )
        _rows(axes, [str(label) for label in values.index], xlabel)
        if len(values.columns) > 1:
            _legend(figure, axes)
        return to_svg(figure, name, description)


def steps(name: str, values: Mapping[str, float], xlabel: str, description: str) -> str:
    """Horizontal bars of growing values from 1, each with its number."""
    with _figure(0.75 + 0.32 * len(values)) as (figure, axes):
        speedups = np.array([*values.values()])
        axes.barh(np.arange(len(values)), speedups - 1, left=1.0, height=0.62, color=SERIES[0], alpha=0.85)
        for row, value in enumerate(speedups):
            _value_label(axes, value, value, row)
        _rows(axes, [*values], xlabel)
        axes.margins(x=0.16)
        return to_svg(figure, name, description)
