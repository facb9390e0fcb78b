"""Counts of the proposals that the target accepts, by depth and by rank."""

from __future__ import annotations

from typing import Literal

import numpy as np

from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_CHILDREN, MAX_LEVELS, Ints
from autotune.trees.tree import ROOT, Tree

Rows = dict[Literal["by_depth", "by_rank"], list[list[int]]]
"""(offered, accepted) of each depth from 1 on, and of each rank from 0 on, up to the last that was offered."""


class AcceptanceCounts:
    """Counts over rounds, [depth or rank, (offered, accepted)].

    A round offers a depth if the accepted path reaches the depth above and its last node has children. A rank is
    offered by the root, or an accepted node, that has a child of this rank in the tree.
    """

    def __init__(self) -> None:
        self.by_depth = np.zeros((MAX_LEVELS, 2), np.int64)
        self.by_rank = np.zeros((MAX_CHILDREN, 2), np.int64)

    def observe(self, tree: Tree, path: Ints) -> None:
        count_round(tree, path, self.by_depth, self.by_rank)

    def add(self, other: AcceptanceCounts) -> None:
        self.by_depth += other.by_depth
        self.by_rank += other.by_rank

    @classmethod
    def from_json(cls, counts: Rows) -> AcceptanceCounts:
        """The inverse of ``to_json``; a table that is missing counts nothing."""
        parsed = cls()
        for name, table in parsed._tables().items():
            rows = counts.get(name, [])
            table[: len(rows)] = np.reshape(rows, (-1, 2))
        return parsed

    def to_json(self) -> Rows:
        tables = self._tables().items()
        return {name: table[: 1 + max(np.flatnonzero(table[:, 0]), default=-1)].tolist() for name, table in tables}

    def _tables(self) -> dict[Literal["by_depth", "by_rank"], Ints]:
        return {"by_depth": self.by_depth[1:], "by_rank": self.by_rank}


@compiled
def count_round(tree: Tree, path: Ints, by_depth: Ints, by_rank: Ints) -> None:
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
