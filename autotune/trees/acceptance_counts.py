"""How well a draft does: which of its proposals the target takes, by depth and by rank, near an image and in running
text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.trees.tree import MAX_LEVELS, ROOT, Ints, Tree, compiled

NEAR_IMAGE_TOKENS = 64  # a root at most this far behind the prompt's last visual token is near the image
NUM_RANKS = 16
_PLACES = ("text", "near_image")


class AcceptanceCounts:
    """Counts over rounds: [place, depth or rank, (offered, accepted)]. A depth is offered by a round that accepted a
    node of every depth above it, the last of which has children; a rank by an accepted node, or the root, that has such a
    child in the tree.
    """

    def __init__(self) -> None:
        self.by_depth = np.zeros((len(_PLACES), MAX_LEVELS, 2), np.int64)
        self.by_rank = np.zeros((len(_PLACES), NUM_RANKS, 2), np.int64)

    def observe(self, tree: Tree, path: Ints, *, is_near_image: bool) -> None:
        """A round ended: ``path`` are the accepted nodes."""
        place = int(is_near_image)
        count_round(tree, path, self.by_depth[place], self.by_rank[place])

    def add(self, other: AcceptanceCounts) -> None:
        """Take in the counts of another request."""
        self.by_depth += other.by_depth
        self.by_rank += other.by_rank

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> AcceptanceCounts:
        """What ``to_json`` gave."""
        parsed = cls()
        for i, place in enumerate(_PLACES):
            for table, rows in ((parsed.by_depth[i, 1:], "by_depth"), (parsed.by_rank[i], "by_rank")):
                for row, counts in enumerate(found[place][rows]):
                    table[row] = counts
        return parsed

    @property
    def is_empty(self) -> bool:
        """Whether nothing was drafted."""
        return not self.by_depth.any()

    def to_json(self) -> dict[str, Any]:
        """``{"text": {"by_depth": [[offered, accepted], ...], "by_rank": [...]}, "near_image": ...}``; depth 1 and rank
        0 come first, and what was never offered behind the last that was is left out.
        """
        tables = {"by_depth": self.by_depth[:, 1:], "by_rank": self.by_rank}
        return {
            place: {name: table[i, : _used(table[i])].tolist() for name, table in tables.items()}
            for i, place in enumerate(_PLACES)
        }


def _used(table: Ints) -> int:
    rows = np.flatnonzero(table[:, 0])
    return int(rows[-1]) + 1 if len(rows) else 0


@compiled
def count_round(tree: Tree, path: Ints, by_depth: Ints, by_rank: Ints) -> None:
    """Add one round to the counts."""
    parent = ROOT
    for step in range(len(path) + 1):
        accepted = path[step] if step < len(path) else -1
        is_offered = False
        for node in range(parent + 1, tree.size[0]):
            if tree.parent[node] == parent:
                is_offered = True
                by_rank[tree.rank[node], 0] += 1
                if node == accepted:
                    by_rank[tree.rank[node], 1] += 1
        if is_offered:
            by_depth[step + 1, 0] += 1
            by_depth[step + 1, 1] += accepted >= 0
        parent = accepted
