"""A token tree as SVG: the draft's proposals in one round, and the tokens that the target accepted."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from autotune.trees.tree import ROOT, Ints, Tree

COLUMN, ROW = 93, 40  # pixels from node to node
BOX_WIDTH, BOX_HEIGHT = 74, 30
MAX_LETTERS = 8


def visible(text: str) -> str:
    """A token's text with visible white space: ``·`` a space, ``⏎`` a line break."""
    return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def node_rows(parent: Ints, rank: Ints) -> list[int]:
    """Row of each node: leaves are below each other, a parent is next to the first of its children, children are in
    order of rank.
    """
    size = len(parent)
    children = [[child for child in range(1, size) if parent[child] == node] for node in range(size)]
    row = [0] * size

    def place(node: int, first_row: int) -> int:
        """Place a node and its descendants; return the next free row."""
        row[node] = next_row = first_row
        for child in sorted(children[node], key=lambda child: int(rank[child])):
            next_row = place(child, next_row)
        return next_row if children[node] else next_row + 1

    place(ROOT, 0)
    return row


def _edge(begin: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    x, y = begin[0] + BOX_WIDTH, begin[1] + BOX_HEIGHT / 2
    to_x, to_y = end[0], end[1] + BOX_HEIGHT / 2
    middle = x + (to_x - x) / 2
    return f'<path class="edge {kind}" d="M{x:g} {y:g}C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"/>'


def _box(corner: tuple[float, float], text: str, caption: str, kind: str, title: str) -> str:
    x, y = corner
    shown = visible(text)
    shown = shown if len(shown) <= MAX_LETTERS else shown[: MAX_LETTERS - 1] + "…"
    return (
        f'<g class="node {kind}"><title>{html.escape(title)}</title>'
        f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
        f'<text class="token" x="{x + BOX_WIDTH / 2:g}" y="{y + 13:g}">{html.escape(shown)}</text>'
        f'<text class="share" x="{x + BOX_WIDTH / 2:g}" y="{y + 25:g}">{html.escape(caption)}</text></g>'
    )


def draw_tree(tree: Tree, path: Sequence[int], texts: Sequence[str], next_text: str | None, label: str) -> str:
    """Draw the tree from left to right, a box for each node with its token and the draft's probability. The accepted
    ``path`` is filled and ticked; ``next_text``, the target's own token, follows it in a double frame.
    """
    size = int(tree.size[0])
    parent, depth = tree.parent[:size], tree.depth[:size]
    row = node_rows(parent, tree.rank[:size])
    corners = [(6 + COLUMN * float(depth[node]), 8 + ROW * row[node]) for node in range(size)]
    last = path[-1] if path else ROOT
    next_row = max(row) + 1 if size > 1 else 0
    next_corner = (6 + COLUMN * float(depth[last] + 1), 8 + ROW * next_row)
    kinds = ["accepted" if node in set(path) else "rejected" for node in range(size)]
    parts = [_edge(corners[int(parent[node])], corners[node], kinds[node]) for node in range(1, size)]
    if next_text is not None:
        parts.append(_edge(corners[last], next_corner, "own"))
    parts.append(_box(corners[ROOT], texts[ROOT], "root", "root", f"last token of the prefix: {texts[ROOT]!r}"))
    for node in range(1, size):
        logprob = tree.path_logprob[node]  # -inf for retrieved tokens, and for their children
        share = float(np.exp(logprob - tree.path_logprob[parent[node]])) if np.isfinite(logprob) else 0.0
        facts = f"{texts[node]!r}, depth {depth[node]}, rank {tree.rank[node] + 1}, probability {100 * share:.1f} %"
        caption = f"{'✓ ' if kinds[node] == 'accepted' else ''}{100 * share:.0f} %"
        parts.append(_box(corners[node], texts[node], caption, kinds[node], f"{facts}: {kinds[node]}"))
    if next_text is not None:
        parts.append(_box(next_corner, next_text, "target's own", "own", f"the target's own token: {next_text!r}"))
    max_depth = max(int(depth.max()), int(depth[last]) + (next_text is not None))
    width = 12 + COLUMN * max_depth + BOX_WIDTH
    height = 16 + ROW * (next_row if next_text is not None else max(row)) + BOX_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tree" role="img" aria-label="{html.escape(label)}" '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">{"".join(parts)}</svg>'
    )
