"""A plot of the training log: loss, agreement of the draft with the target, and the distilled layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.files import read_lines, write_bytes

AGREEMENT_METRIC = "held_out_agreement"
AGREEMENT = "agreement with the target"
# Panels, with the label and style of each logged metric; the few held-out points have markers.
PANELS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "loss": {
        "loss": ("training", {"color": "tab:blue", "alpha": 0.35}),
        "held_out_loss": ("held out", {"color": "tab:blue", "marker": "o", "markersize": 4}),
    },
    AGREEMENT: {
        "agreement": ("training, true features", {"color": "tab:blue", "alpha": 0.35}),
        AGREEMENT_METRIC: ("held out, true features", {"color": "tab:blue", "marker": "o", "markersize": 4}),
        "held_out_own_agreement": ("held out, own features", {"color": "tab:orange", "marker": "s", "markersize": 4}),
    },
}


def logged(log: Path) -> list[dict[str, Any]]:
    """The steps of a log in order. After a restart from a checkpoint, repeated steps replace the earlier ones."""
    steps: list[dict[str, Any]] = []
    for record in read_lines(log):
        while steps and (steps[-1]["stage"], steps[-1]["step"]) >= (record["stage"], record["step"]):
            steps.pop()
        steps.append(record)
    return steps


def distilled_layers(steps: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Number of steps by the target layer that intermediate distillation aligned, over all stages; empty without it.

    A line counts the steps since the line before it.
    """
    counts: Counter[int] = Counter()
    for record in steps:
        counts.update({int(layer): number for layer, number in record.get("distilled_layers", {}).items()})
    return dict(sorted(counts.items()))


def draw_curve(log: Path, path: Path) -> None:
    """Plot loss and agreement over the steps of all stages, and a histogram of the distilled layers, as a PNG file."""
    import io

    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    steps = logged(log)
    begins: dict[int, int] = {}
    num_steps = 0
    for stage in dict.fromkeys(record["stage"] for record in steps):
        begins[stage] = num_steps
        num_steps += max(record["step"] for record in steps if record["stage"] == stage)
    layers = distilled_layers(steps)
    heights = [3] * len(PANELS) + [2] * bool(layers)
    figure = Figure(figsize=(8, sum(heights)), dpi=150, layout="constrained")
    panels = figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    last = panels[len(PANELS) - 1]
    for panel in panels[: len(PANELS) - 1]:
        panel.sharex(last)
        panel.tick_params(labelbottom=False)
    for panel, (title, lines) in zip(panels, PANELS.items(), strict=False):
        panel.set_ylabel(title)
        for name, (label, style) in lines.items():
            points = [(begins[record["stage"]] + record["step"], record[name]) for record in steps if name in record]
            if points:
                panel.plot(*zip(*points, strict=True), label=label, linewidth=1.5, **style)
        panel.grid(alpha=0.3)
        for begin in begins.values():
            if begin > 0:
                panel.axvline(begin, color="black", linewidth=0.8, linestyle="--")
        if panel.lines:
            panel.legend(fontsize=8)
        if title == AGREEMENT:
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    for stage, begin in begins.items():
        text = f" stage {stage + 1}" + "\n" * (stage % 2)  # names of short stages do not overlap
        panels[0].text(begin, 1.02, text, fontsize=8, transform=panels[0].get_xaxis_transform())
    last.set_xlabel("step")
    last.set_xlim(0, max(num_steps, 1))
    if layers:
        total = sum(layers.values())
        bars = panels[-1]
        bars.bar(list(layers), [number / total for number in layers.values()], color="tab:blue")
        bars.set(xticks=range(1, max(layers) + 1), xlim=(0.4, max(layers) + 0.6))
        bars.set(xlabel="distilled layer of the target", ylabel="share of steps")
        bars.yaxis.set_major_formatter(PercentFormatter(1.0))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(path, buffer.getvalue())
