"""Figures of the documentation as SVG, one file for light and one for dark pages, from result files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autotune.files import content_key
from autotune.report.svg import DASHES, INK, MARKERS, MUTED, SERIES, STYLE, to_svg
from benchmarks.evidence.result import ROOT, Result, Rows
from benchmarks.evidence.searches import ALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Result]
FIGURES = ROOT / "docs" / "figures"
SCHEMES = ("light", "dark")
WIDTH = 4.8  # inches: readable on a phone
BAND = 0.1
TITLES = {
    "digits": "digits: a small LLaVA reads images",
    "smollm2": "SmolLM2-135M-Instruct: text",
    "benchmarks": "SmolLM2: MT-Bench, HumanEval, GSM8K",
    "sampled": "SmolLM2: the same at temperature 1",
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_STAMP = "<!-- values {} picture {} -->"


class Picture(NamedTuple):
    """A figure, and the names of the results that it shows."""

    draw: Callable[[Results], Figure]
    description: Callable[[Results], str]
    """The text for screen readers."""
    inputs: Callable[[Results], list[str]]
    by_pair: bool = False
    """Whether each pair has a file of its own, which stand side by side where there is room."""


def pairs_with(results: Results, kind: str) -> list[str]:
    """Pairs that have a result of this kind, digits first."""
    return [pair for pair in TITLES if f"{kind}-{pair}" in results]


def shown_speedups(result: Result) -> Rows:
    """Speedups of the search that is shown: the one with the median speedup."""
    shown = result.values["summary"][0]["shown"]
    return [row for row in result.values["speedups"] if row["search"] == shown]


def _panels(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), squeeze=False, gridspec_kw={"height_ratios": heights})
    return figure, list(axes[:, 0])


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))


def _with_room_for_labels(axes: Axes) -> None:
    """Labels stand to the right of the intervals."""
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.16 * (high - low))


def speedups(results: Results) -> Figure:
    """Tuned and best default over plain decoding, with intervals, by pair and task."""
    pairs = pairs_with(results, "default-search")
    rows_of = {pair: shown_speedups(results[f"default-search-{pair}"]) for pair in pairs}
    tasks_of = {pair: list(dict.fromkeys(row["task"] for row in rows)) for pair, rows in rows_of.items()}
    figure, panels = _panels([0.85 + 0.33 * len(tasks_of[pair]) for pair in pairs])
    for pair, axes in zip(pairs, panels, strict=True):
        tasks = tasks_of[pair]
        for row in rows_of[pair]:
            if row["over"] != "ar" or row["arm"] == "hf":
                continue
            is_tuned = row["arm"] == "tuned"
            y = tasks.index(row["task"]) + (-0.14 if is_tuned else 0.18)
            colour, marker = (SERIES[0], "D") if is_tuned else (SERIES[1], "o")
            axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=2.4 if is_tuned else 1.4)
            label = (
                None if row["task"] != ALL or pair != pairs[0] else "tuned" if is_tuned else "best published default"
            )
            fill = colour if is_tuned else "none"
            axes.plot(
                [row["speedup"]],
                [y],
                marker,
                color=colour,
                markerfacecolor=fill,
                markersize=5.5,
                label=label,
                linestyle="",
            )
            if is_tuned:
                text, end = f"{row['speedup']:.2f}x", (row["high"], y)
                axes.annotate(text, end, (5, 0), textcoords="offset points", va="center", fontsize=8.5)
        line = axes.axvline(1.0, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        if pair == pairs[0]:
            line.set_label("plain decoding, 1x")
        axes.set_yticks(range(len(tasks)), ["all tasks" if task == ALL else task for task in tasks])
        axes.get_yticklabels()[0].set_fontweight("bold")
        axes.set_ylim(len(tasks) - 0.5, -0.6)
        axes.grid(axis="y", visible=False)
        _with_room_for_labels(axes)
        axes.set_title(TITLES[pair], loc="left", fontsize=10)
    panels[-1].set_xlabel("speedup over plain decoding, 95 % intervals")
    _legend(figure, panels[0], 2)
    return figure


def predictions(results: Results) -> Figure:
    """Predicted against measured speedups, with the band of 10 %."""
    groups: dict[str, Rows] = {}
    for pair in TITLES:
        for kind, label in (
            ("default-search", "finalists, winner"),
            ("predictions", "random trees"),
            ("repeated-searches", "winners of repeated searches"),
        ):
            if f"{kind}-{pair}" in results:
                groups[f"{pair}: {label}"] = results[f"{kind}-{pair}"].values["predictions"]
    figure, (axes,) = _panels([3.1])
    ends = [row[key] for rows in groups.values() for row in rows for key in ("predicted", "measured")]
    low, high = 0.93 * min(ends), 1.05 * max(ends)
    line = np.array([low, high])
    axes.fill_between(
        line, (1 - BAND) * line, (1 + BAND) * line, color=MUTED, alpha=0.16, linewidth=0, label="within 10 %"
    )
    axes.plot(line, line, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    for number, (label, rows) in enumerate(groups.items()):
        measured, predicted = [row["measured"] for row in rows], [row["predicted"] for row in rows]
        style = {"color": SERIES[number % 6], "marker": MARKERS[number % 6], "markerfacecolor": "none", "linestyle": ""}
        axes.plot(measured, predicted, markersize=5.5, label=label, **style)
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="measured speedup", ylabel="predicted speedup")
    _legend(figure, axes, 2)
    return figure


def steps(results: Results) -> Figure:
    """Time of a step by its tokens, target and drafts, in plain steps."""
    pairs = pairs_with(results, "steps")
    figure, panels = _panels([2.8] * len(pairs))
    for pair, axes in zip(pairs, panels, strict=True):
        rows = results[f"steps-{pair}"].values["steps"]
        parts = [part for part in dict.fromkeys(row["part"] for row in rows) if part not in ("plain step", "retrieval")]
        for number, part in enumerate(parts):
            points = [(row["tokens"], row["plain_steps"]) for row in rows if row["part"] == part]
            style = {"color": SERIES[number % 6], "marker": MARKERS[number % 6], "linestyle": DASHES[number % 6]}
            label = "target, verification" if part == "target" else f"{part.split('/')[-1]}, a level"
            axes.plot(*zip(*points, strict=True), linewidth=1.5, markersize=4.5, label=label, **style)
        axes.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        most = max(row["tokens"] for row in rows)
        ticks = [2**power for power in range(9) if 2**power <= most]
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.set_title(TITLES[pair], loc="left", fontsize=10)
        axes.set_ylabel("time in plain steps")
        axes.legend(fontsize=8, ncols=2, loc="upper left")
        axes.set_ylim(0, 1.45 * max(row["plain_steps"] for row in rows))
    panels[-1].set_xlabel("tokens in the forward pass")
    return figure


REPEATED = tuple(f"all but the {dimension}" for dimension in ("visual tokens", "heads", "injection layer", "draft"))
"""Rows that the table has and the figure leaves out: none of them differs from the tree alone."""


def dimensions(results: Results) -> Figure:
    """Measured speedup where only some dimensions are searched."""
    rows = [row for row in results["dimensions-digits"].values["arms"] if not row["dimensions"].startswith(REPEATED)]
    figure, (axes,) = _panels([0.8 + 0.3 * len(rows)])
    for y, row in enumerate(rows):
        is_first = y == 0
        colour = MUTED if is_first else SERIES[0]
        axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=2)
        axes.plot([row["measured"]], [y], "o" if is_first else "D", color=colour, markersize=5.5)
        label, end = f"{row['measured']:.2f}x", (row["high"], y)
        axes.annotate(label, end, (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=(0, (2, 2)))
    axes.set_yticks(range(len(rows)), [row["dimensions"] for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    _with_room_for_labels(axes)
    axes.set_xlabel("measured speedup, 95 % intervals")
    return figure


def acceptance(results: Results) -> Figure:
    """Accepted share of the tokens at each depth, given that the depth before was accepted."""
    rows = results["acceptance"].values["drafts"]
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    figure, panels = _panels([2.8] * len(pairs))
    for pair, axes in zip(pairs, panels, strict=True):
        for number, row in enumerate(row for row in rows if row["pair"] == pair):
            shares = [100 * share for share in row["by_depth"]]
            style = {"color": SERIES[number % 6], "marker": MARKERS[number % 6], "linestyle": DASHES[number % 6]}
            label = f"{row['draft']}, M {row['tokens_per_round']:.2f}"
            axes.plot(range(1, len(shares) + 1), shares, linewidth=1.5, markersize=4.5, label=label, **style)
        depth = max(len(row["by_depth"]) for row in rows if row["pair"] == pair)
        axes.set_xticks(range(1, depth + 1))
        axes.set_ylim(0, 104)
        axes.set_title(TITLES[pair], loc="left", fontsize=10)
        axes.set_ylabel("accepted, %")
        axes.legend(fontsize=8, ncols=2, loc="lower left")
    panels[-1].set_xlabel("depth in the tree")
    return figure


FUNNEL = {
    "subnets": "subnets of all drafts",
    "survivors": "survive screening",
    "configurations": "trees replayed",
    "confirmed": "ranked again on other prompts",
    "candidates": "run for real, defaults included",
}


def funnel_counts(result: Result) -> dict[str, int]:
    """How many candidates each stage of the shown search left."""
    shown = result.values["summary"][0]["shown"]
    row = next(row for row in result.samples["searches"] if row["search"] == shown)
    counts = {**row, "candidates": row["finalists"] + row["defaults"]}
    return {stage: counts[stage] for stage in FUNNEL}


def funnel(results: Results) -> Figure:
    """Candidates that each stage of a default search leaves, on a log scale."""
    counts = funnel_counts(results["default-search-digits"])
    figure, (axes,) = _panels([0.75 + 0.36 * len(counts)])
    values = list(counts.values())
    bars = axes.barh(range(len(values)), [max(value, 1.15) for value in values], 0.6, color=SERIES[0])
    axes.set_xscale("log")
    axes.set_xlim(1, 12 * max(values))
    axes.bar_label(bars, [f"{value:,}" for value in values], padding=5, fontsize=9)
    axes.set_yticks(range(len(values)), [FUNNEL[stage] for stage in counts])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("candidates, log scale")
    return figure


def _named(*kinds: str) -> Callable[[Results], list[str]]:
    return lambda results: [name for name in results if name.startswith(kinds)]


def _speedups_text(results: Results) -> str:
    parts = []
    for pair in pairs_with(results, "default-search"):
        rows = [
            row
            for row in shown_speedups(results[f"default-search-{pair}"])
            if row["task"] == ALL and row["over"] == "ar"
        ]
        parts.append(f"{pair}: " + ", ".join(f"{row['arm']} {row['speedup']:.2f}x" for row in rows))
    return f"Speedups over plain decoding by pair and task, with intervals. Over all tasks, {'; '.join(parts)}."


PICTURES: dict[str, Picture] = {
    "speedups": Picture(speedups, _speedups_text, _named("default-search")),
    "tasks": Picture(speedups, _speedups_text, _named("default-search"), by_pair=True),
    "predictions": Picture(
        predictions,
        lambda results: "Predicted against measured speedups; a band shows where both differ by less than 10 %.",
        _named("default-search", "predictions", "repeated-searches"),
    ),
    "steps": Picture(
        steps,
        lambda results: (
            "Time of a forward pass by its number of tokens, of the target and of every draft, in plain steps."
        ),
        _named("steps"),
        by_pair=True,
    ),
    "dimensions": Picture(
        dimensions,
        lambda results: "Measured speedup where only some dimensions are searched: the tree gives nearly all of it.",
        _named("dimensions"),
    ),
    "acceptance": Picture(
        acceptance,
        lambda results: "Accepted share of the drafted tokens by depth, for every bundled draft.",
        _named("acceptance"),
        by_pair=True,
    ),
    "funnel": Picture(
        funnel,
        lambda results: (
            "Candidates after each stage of a default search: "
            + ", ".join(
                f"{FUNNEL[stage]} {count:,}" for stage, count in funnel_counts(results["default-search-digits"]).items()
            )
            + "."
        ),
        _named("default-search-digits"),
    ),
}


def palettes() -> dict[str, dict[str, str]]:
    """Colours of the report's page by CSS variable, light and dark."""
    css = (ROOT / "autotune" / "report" / "page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.S)[:2]
    return {
        scheme: dict(re.findall(r"(--[\w-]+): (#\w+)", block)) for scheme, block in zip(SCHEMES, blocks, strict=True)
    }


def files_of(name: str, results: Results) -> dict[str, Results]:
    """Names of a picture's files, without scheme and suffix, and the results that each shows; none without results."""
    picture = PICTURES[name]
    if not picture.inputs(results):
        return {}
    if not picture.by_pair:
        return {name: results}
    found = {f"{name}-{pair}": only(results, pair) for pair in TITLES}
    return {file: shown for file, shown in found.items() if picture.inputs(shown)}


def only(results: Results, pair: str) -> Results:
    """The results of one pair, and of those that hold both pairs its rows."""
    chosen = {name: result for name, result in results.items() if name.endswith(f"-{pair}")}
    if "acceptance" in results:
        rows = [row for row in results["acceptance"].values["drafts"] if row["pair"] == pair]
        if rows:
            chosen["acceptance"] = results["acceptance"].model_copy(update={"values": {"drafts": rows}})
    return chosen


def pictures(results: Results) -> Iterator[tuple[str, str]]:
    """File names and contents of all figures whose results are there."""
    import matplotlib as mpl

    for name, picture in PICTURES.items():
        for file, shown in files_of(name, results).items():
            with mpl.rc_context(STYLE):
                svg = to_svg(picture.draw(shown), file, picture.description(shown))
            svg = svg.replace('class="plot"', f'font-family="{FONT}"', 1)
            for scheme, colours in palettes().items():
                body = (
                    re.sub(r"var\((--[\w-]+)\)", lambda match, colours=colours: colours[match[1]], svg).rstrip() + "\n"
                )
                yield f"{file}-{scheme}.svg", body + _STAMP.format(_values_key(name, shown), _key(body)) + "\n"


def _values_key(name: str, results: Results) -> str:
    """Hash of the values that a figure shows."""
    return content_key([results[name].content_hash for name in PICTURES[name].inputs(results)])


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def wrong_pictures(results: Results) -> list[str]:
    """Figures that are missing, edited by hand, or of other values than the results'. Does not draw."""
    problems = []
    files = [(name, file, shown) for name in PICTURES for file, shown in files_of(name, results).items()]
    for name, file, shown in files:
        for scheme in SCHEMES:
            path = FIGURES / f"{file}-{scheme}.svg"
            body, _, stamp = (path.read_text() if path.exists() else "").rpartition("<!-- values ")
            if f"<!-- values {stamp}" != _STAMP.format(_values_key(name, shown), _key(body)) + "\n":
                problems.append(f"docs/figures/{path.name} is not what the results give; run make figures")
    return problems
