"""The plots of the page by name: each function selects the numbers for its figures."""

from __future__ import annotations

from autotune.documents.decoding_profile import ComparedArm
from autotune.report import figures
from autotune.report.content import Content
from autotune.report.figures import Bar, Line

MAX_LINES = 6


def all_plots(content: Content) -> dict[str, str]:
    """Every plot for which there are numbers, as SVG."""
    parts = (_evaluation, _fronts, _ablation, _importance, _acceptance, _costs)
    return {name: svg for part in parts for name, svg in part(content).items()}


def _bar(arm: ComparedArm, *, is_strong: bool = False) -> Bar:
    return Bar(arm.name, arm.speedup, arm.ci95, is_strong)


def _evaluation(content: Content) -> dict[str, str]:
    drawn = {}
    arms = content.arms
    if arms is not None:
        shown = [arm for arm in (arms.plain, *arms.defaults, arms.tuned) if arm is not None]
        bars = [_bar(arm, is_strong=arm is arms.profile) for arm in shown]
        values = "; ".join(f"{bar.label} {bar.value:.2f}" for bar in bars)
        drawn["evaluation"] = figures.intervals(
            "evaluation",
            bars,
            "speedup over plain decoding, 95 % CI",
            f"Measured speedups with confidence intervals: {values}.",
        )
    groups: dict[str, list[tuple[float, Bar]]] = {}
    for finalist in content.sources.study.finalists if content.sources.study else []:
        bar = Bar(content.letters[finalist.configuration.label], finalist.speedup, finalist.ci95)
        groups.setdefault("finalists, tuning prompts", []).append((finalist.predicted_speedup, bar))
    for arm in [*arms.defaults, *([arms.tuned] if arms.tuned else [])] if arms else []:
        if arm.predicted_speedup is not None:
            groups.setdefault("arms, held-out prompts", []).append((arm.predicted_speedup, _bar(arm)))
    if groups:
        num = sum(map(len, groups.values()))
        description = f"Predicted and measured speedups of {num} configurations; the tables have the numbers."
        drawn["predictions"] = figures.predicted_against_measured("predictions", groups, description)
    return drawn


def _fronts(content: Content) -> dict[str, str]:
    drawn = {}
    if content.front:
        clouds = {**content.by_size, "Pareto front": content.front}
        *policies, best = (
            Line(label, [c.nodes_per_round for c in candidates], [c.ms_per_token for c in candidates])
            for label, candidates in clouds.items()
        )
        drawn["front-nodes"] = figures.front(
            "front-nodes",
            policies,
            best,
            x="drafted tokens verified per round",
            y="predicted ms per token",
            description=f"Predicted time by tree size and policy; the front falls from {best.y[0]:.2f} to {best.y[-1]:.2f} ms.",
        )
    sized = [(v.draft_mib, v) for v in content.variants if v.draft_mib is not None]
    if len(sized) > 1:
        by_draft: dict[str, list[tuple[float, float]]] = {}
        for mib, variant in sized:
            draft = variant.best.configuration.draft or ""
            by_draft.setdefault(draft, []).append((mib, variant.best.ms_per_token))
        front = [(mib, variant.best.ms_per_token) for mib, variant in sized if variant.is_on_front]
        *drafts, best = (
            Line(label, [mib for mib, _ in points], [ms for _, ms in points])
            for label, points in [*by_draft.items(), ("Pareto front", front)]
        )
        drawn["front-memory"] = figures.front(
            "front-memory",
            drafts,
            best,
            x="memory of the draft and its KV cache, MiB",
            y="predicted ms per token",
            description=f"Predicted time by memory of {len(sized)} draft variants; the table has the numbers.",
        )
    return drawn


def _ablation(content: Content) -> dict[str, str]:
    import pandas as pd

    drawn = {}
    if len(content.cumulative) > 1:
        values = {step.label: step.best.speedup for step in content.cumulative}
        described = "; ".join(f"{label} {value:.2f}" for label, value in values.items())
        drawn["cumulative-ablation"] = figures.steps(
            "cumulative-ablation",
            values,
            "predicted speedup of the best chain",
            f"Speedup as the dimensions are freed one by one: {described}.",
        )
    gains = {ablation.dimension: 100 * ablation.gain for ablation in content.ablations if ablation.gain is not None}
    if gains:
        described = "; ".join(f"{dimension} {gain:.1f} %" for dimension, gain in gains.items())
        drawn["ablation"] = figures.grouped_bars(
            "ablation",
            pd.DataFrame({"saved": gains}).loc[[*gains]],
            "predicted decoding time saved, %",
            f"Decoding time saved by searching each dimension: {described}.",
        )
    return drawn


def _importance(content: Content) -> dict[str, str]:
    drawn = {}
    for number, found in enumerate(content.importance):
        shares = found.shares.set_axis(found.shares.index.str.removeprefix(f"{found.group}."))
        drawn[f"importance-{number}"] = figures.grouped_bars(
            f"importance-{number}",
            shares,
            "importance",
            f"Importance of {len(shares)} parameters in {found.num_trials} trials of {found.group}; {shares.index[0]} is "
            "the most important one by fANOVA.",
        )
    return drawn


def _acceptance(content: Content) -> dict[str, str]:
    drawn = {}
    labels = {"replayed": "tuning prompts, replayed", "measured": "held-out prompts, measured"}
    for point in content.acceptance:
        for kind, table in point.tables.items():
            series = []
            for source, label in labels.items():
                offered, accepted = table[f"{source}_offered"], table[f"{source}_accepted"]
                share = (100 * accepted / offered)[offered > 0]
                if len(share):
                    series.append(Line(label, share.index.tolist(), share.tolist()))
            if series:
                values = ", ".join(f"{y:.0f}" for y in series[0].y)
                drawn[f"{kind}-{point.number}"] = figures.lines(
                    f"{kind}-{point.number}",
                    series,
                    x="depth in the tree" if kind == "depth" else "rank among the draft's choices",
                    y="accepted, % of offered",
                    description=f"Accepted share of offered tokens by {kind}, {series[0].label}, in per cent: {values}.",
                    integer_x=True,
                    height=2.4,
                )
    return drawn


def _costs(content: Content) -> dict[str, str]:
    drawn = {}
    for name, is_draft in (("cost-target", False), ("cost-drafts", True)):
        curves = [curve for curve in content.curves if curve.is_draft == is_draft and len(curve.tokens) > 1]
        if is_draft:  # first levels cost little more; the table has them
            curves = [curve for curve in curves if curve.part.endswith("other levels")][:MAX_LINES]
        series = []
        for curve in curves:
            label = curve.part.removesuffix(", other levels")
            series.append(Line(label, curve.tokens, [curve.ms(n) or 0.0 for n in curve.tokens]))
            if curve.limit_ms(1) is not None:
                series.append(Line(f"limit: {label}", curve.tokens, [curve.limit_ms(n) or 0.0 for n in curve.tokens]))
        if series:
            plain = next((curve.ms(1) for curve in content.curves if len(curve.tokens) == 1), None)
            drawn[name] = figures.lines(
                name,
                series,
                x="tokens per forward pass",
                y="ms",
                description=f"Latency by tokens of {', '.join(line.label for line in series)}; the table has the numbers.",
                log=True,
                dashed_line=None if is_draft else plain,
            )
    return drawn
