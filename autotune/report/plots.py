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

    sections = (_evaluation, _predictions, _fronts, _ablation, _acceptance, _costs)
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


def _predictions(content: Content) -> Plots:
    study, arms = content.sources.study, content.arms
    groups: dict[str, list[tuple[float, Bar]]] = {}
    for finalist in study.finalists if study else []:
        if finalist.predicted_speedup is not None:
            bar = Bar(content.letters[finalist.configuration.label], finalist.speedup, finalist.ci95)
            groups.setdefault("finalists, tuning prompts", []).append((finalist.predicted_speedup, bar))
    for arm in [*arms.defaults, *([arms.tuned] if arms.tuned else [])] if arms else []:
        if arm.predicted_speedup is not None:
            bar = Bar(arm.name, arm.speedup, arm.ci95)
            groups.setdefault("arms, held-out prompts", []).append((arm.predicted_speedup, bar))
    if groups:
        num = sum(map(len, groups.values()))
        description = f"Predicted and measured speedups of {num} configurations; the tables have the numbers."
        yield "predictions", description, figures.predicted_against_measured(groups)


def _fronts(content: Content) -> Plots:
    y = "predicted ms per token"
    if content.front:
        *policies, best = (
            Series(label, [c.nodes_per_round for c in candidates], [c.ms_per_token for c in candidates])
            for label, candidates in {**content.by_size, "Pareto front": content.front}.items()
        )
        ends = f"{best.y[0]:.2f} to {best.y[-1]:.2f} ms"
        description = f"Predicted time by tree size and policy; the front falls from {ends}."
        yield "front-nodes", description, figures.front(policies, best, x="drafted tokens verified per round", y=y)


def _ablation(content: Content) -> Plots:
    import pandas as pd

    if len(content.cumulative) > 1:
        speedups = pd.Series({label: best.speedup for label, best in content.cumulative.items()})
        described = "; ".join(f"{label} {speedup:.2f}" for label, speedup in speedups.items())
        label = "predicted speedup of the best chain"
        figure = figures.bars(speedups, label, start=1.0, value_format="{:.2f}x")
        yield "cumulative-ablation", f"Speedup as the dimensions are freed one by one: {described}.", figure


def _acceptance(content: Content) -> Plots:
    labels = {"replayed": "tuning prompts, replayed", "measured": "held-out prompts, measured"}
    axes = {"depth": "depth in the tree", "rank": "rank among the draft's choices"}
    for point in content.acceptance:
        for kind, table in point.tables.items():
            series = []
            for source, label in labels.items():
                offered, accepted = table[f"{source}_offered"], table[f"{source}_accepted"]
                share = (100 * accepted / offered)[offered > 0]
                if len(share):
                    series.append(Series(label, share.index.tolist(), share.tolist()))
            if series:
                values = ", ".join(f"{y:.0f}" for y in series[0].y)
                description = f"Accepted share of offered tokens by {kind}, {series[0].label}, in per cent: {values}."
                figure = figures.lines(series, x=axes[kind], y="accepted, % of offered", height=2.4)
                yield f"{kind}-{point.number}", description, figure


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
