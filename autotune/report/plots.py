"""Which of the page's numbers are drawn, and how: figures by the names under which the page asks for them."""

from __future__ import annotations

from autotune.documents.decoding_profile import ComparedArm
from autotune.report import figures
from autotune.report.content import Content
from autotune.report.figures import Bar, Line
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.tree import Ints

MOST_LINES = 6


def all_plots(content: Content) -> dict[str, str]:
    """Every plot that the numbers at hand allow, as SVG."""
    parts = (_evaluation, _fronts, _worth, _importance, _acceptance, _costs)
    return {name: svg for part in parts for name, svg in part(content).items()}


def _bar(arm: ComparedArm, *, is_strong: bool = False) -> Bar:
    return Bar(arm.name, arm.speedup, arm.ci95, is_strong)


def _evaluation(content: Content) -> dict[str, str]:
    found = content.comparison
    drawn = {}
    if found is not None:
        arms = [arm for arm in (found.plain, *found.defaults, found.tuned) if arm is not None]
        bars = [_bar(arm, is_strong=arm is found.own) for arm in arms]
        said = "; ".join(f"{bar.label} {bar.value:.2f}" for bar in bars)
        drawn["evaluation"] = figures.intervals(
            "evaluation",
            bars,
            "speedup over plain decoding, 95 % interval",
            f"Measured speedups with intervals: {said}.",
        )
    groups: dict[str, list[tuple[float, Bar]]] = {}
    for number, one in enumerate(content.sources.study.finalists if content.sources.study else []):
        bar = Bar(f"F{number + 1}", one.speedup, one.ci95)
        groups.setdefault("finalists, tuning prompts", []).append((one.predicted_speedup, bar))
    for arm in [*found.defaults, *([found.tuned] if found.tuned else [])] if found else []:
        if arm.predicted_speedup is not None:
            groups.setdefault("arms, held-out prompts", []).append((arm.predicted_speedup, _bar(arm)))
    if groups:
        num = sum(map(len, groups.values()))
        description = f"Predicted against measured speedups of {num} configurations; the table has the numbers."
        drawn["predictions"] = figures.predicted_against_measured("predictions", groups, description)
    return drawn


def _fronts(content: Content) -> dict[str, str]:
    drawn = {}
    if content.front:
        clouds = [
            Line(policy, [one.nodes_per_round for one in found], [one.ms_per_token for one in found])
            for policy, found in content.by_size.items()
        ]
        best = Line(
            "nothing is better", [c.nodes_per_round for c in content.front], [c.ms_per_token for c in content.front]
        )
        drawn["front-nodes"] = figures.front(
            "front-nodes",
            clouds,
            best,
            x="drafted tokens verified a round",
            y="predicted ms a token",
            description=f"Predicted time against the size of trees, by policy; the front falls from {best.y[0]:.2f} to {best.y[-1]:.2f} ms.",
        )
    sized = [one for one in content.places if one.draft_mib is not None]
    if len(sized) > 1:
        by_draft: dict[str, list[tuple[float, float]]] = {}
        for one in sized:
            draft = one.best.configuration.draft or ""
            by_draft.setdefault(draft, []).append((one.draft_mib or 0.0, one.best.ms_per_token))
        front = [one for one in sized if one.is_on_front]
        drawn["front-memory"] = figures.front(
            "front-memory",
            [Line(draft, [mib for mib, _ in found], [ms for _, ms in found]) for draft, found in by_draft.items()],
            Line("nothing is better", [o.draft_mib or 0.0 for o in front], [o.best.ms_per_token for o in front]),
            x="memory of the draft and its cache, MiB",
            y="predicted ms a token",
            description=f"Predicted time against memory of {len(sized)} drafts and subnets; the table has the numbers.",
        )
    return drawn


def _worth(content: Content) -> dict[str, str]:
    drawn = {}
    if len(content.ladder) > 1:
        values = {rung.label: rung.best.speedup for rung in content.ladder}
        said = "; ".join(f"{label} {value:.2f}" for label, value in values.items())
        drawn["ladder"] = figures.steps(
            "ladder", values, "predicted speedup of the best chain", f"One dimension after the other set free: {said}."
        )
    gains = {one.dimension: 100 * one.gain for one in content.worth if one.gain is not None}
    if gains:
        said = "; ".join(f"{name} {value:.1f} %" for name, value in gains.items())
        drawn["worth"] = figures.paired_bars(
            "worth",
            {name: {"saved": value} for name, value in gains.items()},
            "decoding time that its freedom saves, %, predicted",
            f"What the freedom of each dimension saves: {said}.",
        )
    return drawn


def _importance(content: Content) -> dict[str, str]:
    drawn = {}
    for number, found in enumerate(content.importance):
        names = next(iter(found.shares.values()))
        rows = {
            name.removeprefix(f"{found.group}."): {kind: shares[name] for kind, shares in found.shares.items()}
            for name in names
        }
        first = next(iter(rows))
        drawn[f"importance-{number}"] = figures.paired_bars(
            f"importance-{number}",
            rows,
            "importance",
            f"Importance of {len(rows)} parameters in {found.num_trials} trials of {found.group}; by fANOVA {first} matters most.",
        )
    return drawn


def _acceptance(content: Content) -> dict[str, str]:
    drawn = {}
    for one in content.acceptance:
        both = {"tuning prompts, replayed": one.replayed, "held-out prompts, measured": one.measured}
        kinds = {"depth": (1, "depth in the tree"), "rank": (0, "choice of the draft, 1 its first")}
        for kind, (first, axis) in kinds.items():
            found = []
            for label, acceptance in both.items():
                counts = counts_of(acceptance, kind)[first:]
                known = [place for place in range(len(counts)) if counts[place, 0] > 0]
                shares = [100 * counts[place, 1] / counts[place, 0] for place in known]
                if known:
                    found.append(Line(label, [place + 1 for place in known], shares))
            if found:
                said = ", ".join(f"{y:.0f}" for y in found[0].y)
                drawn[f"{kind}-{one.number}"] = figures.lines(
                    f"{kind}-{one.number}",
                    found,
                    x=axis,
                    y="accepted of offered, %",
                    description=f"Accepted of offered tokens by {kind}, {found[0].label}, in per cent: {said}.",
                    from_zero=True,
                    whole_x=True,
                    height=2.6,
                )
    return drawn


def counts_of(acceptance: AcceptanceCounts, kind: str) -> Ints:
    """[depth or rank, (offered, accepted)], near images and elsewhere together."""
    table: Ints = (acceptance.by_depth if kind == "depth" else acceptance.by_rank).sum(0)
    return table


def _costs(content: Content) -> dict[str, str]:
    drawn = {}
    for name, is_draft in (("cost-target", False), ("cost-drafts", True)):
        chosen = [one for one in content.curves if one.is_draft == is_draft and len(one.tokens) > 1]
        if is_draft:  # the first level of a round costs a little more: the table has it
            chosen = [one for one in chosen if one.part.endswith("other levels")][:MOST_LINES]
        found = []
        for one in chosen:
            name_of = one.part.removesuffix(", other levels")
            found.append(Line(name_of, one.tokens, [one.ms(n) or 0.0 for n in one.tokens]))
            if one.limit_ms(1) is not None:
                found.append(Line(f"limit: {name_of}", one.tokens, [one.limit_ms(n) or 0.0 for n in one.tokens]))
        if found:
            plain = next((one.ms(1) for one in content.curves if len(one.tokens) == 1), None)
            drawn[name] = figures.lines(
                name,
                found,
                x="tokens in one step",
                y="ms",
                description=f"Latency by tokens of {', '.join(line.label for line in found)}; the table has the numbers.",
                log=True,
                from_zero=True,
                dashed_line=None if is_draft else plain,
            )
    return drawn
