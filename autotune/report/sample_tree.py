"""A token tree as SVG: what the draft proposed behind a piece of the answer, and what the target took of it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.acceptance.rounds import Round
from autotune.trees.tree import ROOT, Ints, Tree

COLUMN, ROW = 93, 40  # pixels from node to node
BOX_WIDTH, BOX_HEIGHT = 74, 30
MOST_LETTERS = 8


def visible(text: str) -> str:
    """A token's text with its blanks to be seen: ``·`` a space, ``⏎`` a line's end."""
    return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def rows_of(parent: Ints, rank: Ints) -> list[float]:
    """Where nodes stand from top to bottom: leaves one below the other, a parent beside the first of its children, which
    are ordered by rank.
    """
    children: list[list[int]] = [[] for _ in parent]
    for node in range(1, len(parent)):
        children[parent[node]].append(node)
    for below in children:
        below.sort(key=lambda node: int(rank[node]))
    row = [0.0] * len(parent)
    next_row, waiting = 0, [ROOT]
    while waiting:  # depth first, the first child first
        node = waiting.pop()
        if node != ROOT:
            siblings = children[parent[node]]
            row[node] = row[parent[node]] if node == siblings[0] else float(next_row)
        if not children[node]:
            next_row += 1
        waiting += reversed(children[node])
    return row


def draw_tree(tree: Tree, path: Sequence[int], texts: Sequence[str], next_text: str | None, label: str) -> str:
    """The tree from left to right, a box for each node with its token and the draft's probability of it. Accepted nodes are
    filled and ticked; behind the last of them stands ``next_text``, the target's own token, in a double frame.
    """
    size = int(tree.size[0])
    parent, depth = tree.parent[:size], tree.depth[:size]
    row = rows_of(parent, tree.rank[:size])
    accepted = set(path)
    last = path[-1] if path else ROOT
    own_row = max(row) + 1 if size > 1 else 0.0
    parts = []

    def place(node: int) -> tuple[float, float]:
        return 6 + COLUMN * float(depth[node]), 8 + ROW * row[node]

    def edge(begin: tuple[float, float], end: tuple[float, float], kind: str) -> str:
        x, y = begin[0] + BOX_WIDTH, begin[1] + BOX_HEIGHT / 2
        to_x, to_y = end[0], end[1] + BOX_HEIGHT / 2
        middle = x + (to_x - x) / 2
        return f'<path class="edge {kind}" d="M{x:g} {y:g}C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"/>'

    def box(at: tuple[float, float], text: str, below: str, kind: str, whole: str) -> str:
        x, y = at
        shown = visible(text)
        shown = shown if len(shown) <= MOST_LETTERS else shown[: MOST_LETTERS - 1] + "…"
        return (
            f'<g class="node {kind}"><title>{html.escape(whole)}</title>'
            f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
            f'<text class="token" x="{x + BOX_WIDTH / 2:g}" y="{y + 13:g}">{html.escape(shown)}</text>'
            f'<text class="share" x="{x + BOX_WIDTH / 2:g}" y="{y + 25:g}">{html.escape(below)}</text></g>'
        )

    for node in range(1, size):
        parts.append(edge(place(int(parent[node])), place(node), "accepted" if node in accepted else "refused"))
    own_at = (6 + COLUMN * float(depth[last] + 1), 8 + ROW * own_row)
    if next_text is not None:
        parts.append(edge(place(last), own_at, "own"))
    parts.append(box(place(ROOT), texts[ROOT], "root", "root", f"last token of the answer so far: {texts[ROOT]!r}"))
    for node in range(1, size):
        share = float(np.exp(tree.path_logprob[node] - tree.path_logprob[parent[node]]))
        is_accepted = node in accepted
        said = f"{texts[node]!r}, depth {depth[node]}, choice {tree.rank[node] + 1} of the draft, {100 * share:.1f} %"
        parts.append(
            box(
                place(node),
                texts[node],
                f"{'✓ ' if is_accepted else ''}{100 * share:.0f} %",
                "accepted" if is_accepted else "refused",
                f"{said}: {'accepted' if is_accepted else 'refused'}",
            )
        )
    if next_text is not None:
        parts.append(box(own_at, next_text, "target's own", "own", f"the target's own token: {next_text!r}"))
    deepest = max(int(depth.max()), int(depth[last]) + (next_text is not None))
    width = 12 + COLUMN * deepest + BOX_WIDTH
    height = 16 + ROW * (own_row if next_text is not None else max(row)) + BOX_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tree" role="img" aria-label="{html.escape(label)}" '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True)
class Stretch:
    """Of the answer: what one round emitted."""

    accepted: str
    own: str
    """The target's own token; empty where the answer ended before it."""
    is_drawn: bool


def stretches(found: Sequence[Round], texts: Sequence[str], drawn: int) -> list[Stretch]:
    """The answer by rounds. ``texts`` are of its tokens, the first of which the prefill emitted."""
    parts = []
    for number, one in enumerate(found):
        begin, end = one.position + 1, one.position + 1 + len(one.path)
        parts.append(Stretch("".join(texts[begin:end]), "".join(texts[end : end + 1]), number == drawn))
    return parts


def round_to_draw(found: Sequence[Round]) -> int:
    """The round in which the tree did most that a chain could not: that accepted most tokens which were not the draft's first
    choice; of several, the one that accepted most; of those the first.
    """

    def merit(number: int) -> tuple[int, int, int, int]:
        one = found[number]
        if one.tree is None:
            return -1, 0, 0, 0
        return int((one.tree.rank[one.path] > 0).sum()), len(one.path), one.num_nodes, -number

    return max(range(len(found)), key=merit)
