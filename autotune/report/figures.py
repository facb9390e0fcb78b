"""Chart types of the report. Each draws the numbers that ``plots.py`` collects, in Matplotlib's style at the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from autotune.report.svg import DASHES, INK, MARKERS, MUTED, SERIES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.4  # inches: readable on a phone
MAX_LABEL = 46  # letters of a legend entry that fit the width


class Bar(NamedTuple):
    label: str
    value: float
    interval: tuple[float, float]
    is_strong: bool = False


class Series(NamedTuple):
    label: str
    x: Sequence[float]
    y: Sequence[float]


def _new_figure(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _rows(axes: Axes, labels: Sequence[str], xlabel: str) -> None:
    """One horizontal row per label, from top to bottom."""
    axes.set_yticks(range(len(labels)), list(labels))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend below the axes, where it covers nothing; long labels are cut in the middle."""
    handles, labels = axes.get_legend_handles_labels()
    half = MAX_LABEL // 2
    shown = [label if len(label) <= MAX_LABEL else f"{label[:half]}…{label[1 - half :]}" for label in labels]
    longest = max(map(len, shown))
    columns = 1 if longest > 24 else 2 if longest > 12 else 3
    figure.legend(handles, shown, loc="outside lower center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(shown) // columns))


def intervals(bars: Sequence[Bar], xlabel: str) -> Figure:
    """A row for each value with its interval, strong ones filled; a dashed line at 1."""
    figure, axes = _new_figure(0.75 + 0.3 * len(bars))
    for row, bar in enumerate(bars):
        colour, width, marker = (SERIES[0], 2.4, "D") if bar.is_strong else (MUTED, 1.6, "o")
        fill = colour if bar.is_strong else "none"
        axes.plot(bar.interval, [row, row], color=colour, linewidth=width, solid_capstyle="butt")
        axes.plot([bar.value], [row], marker, color=colour, markerfacecolor=fill, markersize=6)
        label, end = f"{bar.value:.2f}x", (bar.interval[1], row)
        axes.annotate(label, end, (6, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
    _rows(axes, [bar.label for bar in bars], xlabel)
    axes.margins(x=0.14, y=0.08)
    return figure


def lines(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    is_log: bool = False,
    dotted_line: float | None = None,
    height: float = 3.2,
) -> Figure:
    """Lines with a marker at every point, from zero. Ticks of ``x`` are whole
    numbers, or powers of 2 on a log scale.
    """
    figure, axes = _new_figure(height)
    for number, (label, xs, ys) in enumerate(series):
        colour, marker, dash = (styles[number % len(styles)] for styles in (SERIES, MARKERS, DASHES))
        axes.plot(xs, ys, label=label, color=colour, marker=marker, linestyle=dash, linewidth=1.5, markersize=4.5)
    if dotted_line is not None:
        axes.axhline(dotted_line, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
    max_x = int(max(max(line.x) for line in series))
    if is_log:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    ticks = [2**i for i in range(9) if 2**i <= 1.05 * max_x] if is_log else [*range(1, max_x + 1)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(0.0, 1.07 * max(max(line.y) for line in series) or 1.0)
    axes.set(xlabel=x, ylabel=y)
    if len(series) > 1:
        _legend(figure, axes)
    return figure


def bars(values: pd.Series, xlabel: str, *, start: float = 0.0, value_format: str) -> Figure:
    """A horizontal bar for each row."""
    figure, axes = _new_figure(0.9 + 0.34 * len(values))
    drawn = axes.barh(
        range(len(values)), values - start, 0.8, start, color=SERIES[0], edgecolor=SERIES[0], linewidth=1.1
    )
    axes.bar_label(drawn, [value_format.format(value) for value in values], padding=5, fontsize=8.5)
    _rows(axes, [str(label) for label in values.index], xlabel)
    axes.margins(x=0.16)
    return figure
