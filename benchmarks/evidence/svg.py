"""Matplotlib figures as inline SVG: text stays text, and colours are the page's CSS variables, light or dark.

SVG is small, prints sharply and needs no script; an inlined plotly.js would add 4.5 MB.
"""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Placeholder colours, replaced by CSS variables in the SVG; matplotlib does not support variables.
INK, MUTED, GRID = "#010101", "#010102", "#010103"
SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116")
MARKERS = ("o", "s", "^", "D", "v", "P")  # so that colour is never the only distinction
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {c: f"--series-{i}" for i, c in enumerate(SERIES)}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def to_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an SVG element. ``name`` is unique on the page; ``description`` is the text for screen readers."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", body, flags=re.S)
    # Matplotlib repeats element ids in every figure: referenced ids get the figure's name, the others are removed.
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", body)
    body = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"font: (?:(\d+) )?([\d.]+px) [^;\"]*", r"font-size: \2", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    width, height = figure.get_size_inches()
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="plot" role="img" '
        f'aria-label="{html.escape(description)}" width="{96 * width:.0f}" height="{96 * height:.0f}" '
        f'viewBox="0 0 {72 * width:g} {72 * height:g}">{body}'
    )
