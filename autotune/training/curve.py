"""A plot of the training log: loss, and agreement of the draft with the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.files import read_lines, write_bytes

# Label and style of each logged share; the few held-out points have markers.
SHARES: dict[str, tuple[str, dict[str, Any]]] = {
    "token_accuracy": ("tokens, training", {"color": "tab:blue", "alpha": 0.6}),
    "digit_accuracy": ("digits, training", {"color": "tab:green", "alpha": 0.6}),
    "agreement": ("training, true features", {"color": "tab:blue", "alpha": 0.35}),
    "held_out_agreement": ("held out, true features", {"color": "tab:blue", "marker": "o", "markersize": 4}),
    "held_out_own_agreement": ("held out, own features", {"color": "tab:orange", "marker": "s", "markersize": 4}),
}
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "loss": ("training", {"color": "tab:blue", "alpha": 0.35}),
    "held_out_loss": ("held out", {"color": "tab:blue", "marker": "o", "markersize": 4}),
}


def logged(log: Path) -> list[dict[str, Any]]:
    """The steps of a log in order. After a restart from a checkpoint, repeated steps replace the earlier ones."""
    steps: list[dict[str, Any]] = []
    for record in read_lines(log):
        if not isinstance(record.get("stage"), int):  # a log of an earlier version
            continue
        while steps and (steps[-1]["stage"], steps[-1]["step"]) >= (record["stage"], record["step"]):
            steps.pop()
        steps.append(record)
    return steps


def draw_curve(log: Path, path: Path) -> None:
    """Plot loss and agreement over the steps of all stages as a PNG file."""
    import io

    from matplotlib.figure import Figure

    steps = logged(log)
    stages = {record["stage"]: record["objective"] for record in steps}
    begins, end = {}, 0
    for stage in stages:
        begins[stage] = end
        end += max(record["step"] for record in steps if record["stage"] == stage)
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, lines, label in zip(panels, (LOSSES, SHARES), ("loss", "agreement with the target, %"), strict=True):
        for name, (title, style) in lines.items():
            drawn = [(begins[r["stage"]] + r["step"], r[name]) for r in steps if name in r]
            if drawn:
                scale = 1.0 if lines is LOSSES else 100.0
                panel.plot([x for x, _ in drawn], [scale * y for _, y in drawn], label=title, linewidth=1.5, **style)
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        for begin in begins.values():
            if begin > 0:
                panel.axvline(begin, color="black", linewidth=0.8, linestyle="--")
        if panel.lines:
            panel.legend(fontsize=8)
    for stage, begin in begins.items():
        panels[0].annotate(
            f"stage {stage + 1}: {stages[stage]}",
            (begin, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8,
        )
    panels[1].set_xlabel("step")
    panels[0].set_xlim(0, max(end, 1))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(path, buffer.getvalue())
