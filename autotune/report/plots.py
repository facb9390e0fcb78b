"""The plots of the page: each function yields the names, descriptions for screen readers, and figures of one
section.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autotune.report import figures
from autotune.report.content import Content
from autotune.report.figures import Bar, Series
from autotune.report.svg import STYLE, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LINES = 6
Plots = Iterator[tuple[str, str, "Figure"]]


def all_plots(content: Content) -> dict[str, str]:
    import matplotlib as mpl

    sections = (_evaluation, _ablation, _costs)
    plots = (plot for section in sections for plot in section(content))
    with mpl.rc_context(STYLE):  # colours are taken when an element is created
        return {name: to_svg(figure, name, description) for name, description, figure in plots}


def _evaluation(content: Content) -> Plots:
    if (arms := content.arms) is None:
        return
    shown = [arm for arm in (arms.plain, *arms.defaults, arms.tuned) if arm is not None]
    bars = [Bar(arm.name, arm.speedup, arm.ci95, arm is arms.profile) for arm in shown]
    values = "; ".join(f"{bar.label} {bar.value:.2f}" for bar in bars)
    figure = figures.intervals(bars, "speedup over plain decoding, 95 % CI")
    yield "evaluation", f"Measured speedups with confidence intervals: {values}.", figure


def _ablation(content: Content) -> Plots:
    import pandas as pd

    if len(content.cumulative) > 1:
        speedups = pd.Series({label: best.speedup for label, best in content.cumulative.items()})
        described = "; ".join(f"{label} {speedup:.2f}" for label, speedup in speedups.items())
        label = "predicted speedup of the best chain"
        figure = figures.bars(speedups, label, start=1.0, value_format="{:.2f}x")
        yield "cumulative-ablation", f"Speedup as the dimensions are freed one by one: {described}.", figure


def _costs(content: Content) -> Plots:
    plain = next((curve.ms(1) for curve in content.curves if len(curve.tokens) == 1), None)
    for name, is_draft in (("cost-target", False), ("cost-drafts", True)):
        curves = [curve for curve in content.curves if curve.is_draft == is_draft and len(curve.tokens) > 1]
        if is_draft:  # first levels cost little more; the table has them
            curves = [curve for curve in curves if curve.part.endswith("other levels")][:MAX_LINES]
        series = []
        for curve in curves:
            label = curve.part.removesuffix(", other levels")
            series.append(Series(label, curve.tokens, [curve.ms(n) or 0.0 for n in curve.tokens]))
            if curve.limit_ms(1) is not None:
                series.append(Series(f"limit: {label}", curve.tokens, [curve.limit_ms(n) or 0.0 for n in curve.tokens]))
        if series:
            shown = ", ".join(line.label for line in series)
            dotted = None if is_draft else plain
            figure = figures.lines(series, x="tokens per forward pass", y="ms", is_log=True, dotted_line=dotted)
            yield name, f"Latency by tokens of {shown}; the table has the numbers.", figure
