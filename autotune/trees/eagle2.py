"""``eagle2``: every level expands the ``k`` best nodes by cumulative probability, and of all candidates the ``budget``
best are verified (EAGLE-2, context-aware dynamic draft trees).

A node that is not among the ``budget`` best candidates so far has no descendant that could be: it is not expanded, and
drafting ends when no such node is left. The verified tree is EAGLE-2's all the same, for fewer draft tokens.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from autotune.files import Document
from autotune.trees.tree import Floats, Proposals, Tree, Workspace, add_child, compiled, keep_marked

# params: hyperparameters in this order
_DEPTH, _K, _BUDGET, _LOG_FLOOR = range(4)


class Eagle2Policy(Document):
    """Hyperparameters of ``eagle2``; the defaults are those of its release."""

    KIND: ClassVar[int] = 2
    policy: Literal["eagle2"] = "eagle2"
    depth: int = Field(default=7, ge=1, le=24)
    """Draft levels."""
    k: int = Field(default=10, ge=1, le=16)
    """Nodes expanded in a level, and children of each."""
    budget: int = Field(default=60, ge=1, le=128)
    """Most draft nodes sent to verification, the root not counted."""
    floor: float = Field(default=0.0, ge=0, lt=1)
    """Candidates of a lower cumulative probability are left out: drafting then ends where the draft is unsure. 0, as in
    EAGLE-2: none is.
    """

    @property
    def max_nodes(self) -> int:
        return min(self.budget, self.max_grown)

    @property
    def max_grown(self) -> int:
        return self.k + (self.depth - 1) * self.k**2

    @property
    def max_width(self) -> int:
        return self.k

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def num_proposals(self) -> int:
        return self.k

    def encode(self) -> Floats:
        log_floor = np.log(self.floor) if self.floor else -np.inf
        return np.array([self.depth, self.k, self.budget, log_floor], np.float64)


@compiled
def grow(params: Floats, tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals) -> int:
    """One level: add the candidates that can be among the best; returns how many of them to expand next (written to the
    frontier).
    """
    level = tree.depth[work.frontier[0]] + 1
    k, budget = min(int(params[_K]), proposals.shape[1]), int(params[_BUDGET])
    # Every candidate is ranked as it comes: ``order`` holds the best of the tree so far.
    first = tree.size[0]
    num_best = min(first - 1, budget)
    log_floor = params[_LOG_FLOOR]
    worst = tree.path_logprob[work.order[budget - 1]] if num_best == budget else -np.inf
    for i in range(num_frontier):
        parent = work.frontier[i]
        row, parent_logprob = tree.row[parent], tree.path_logprob[parent]
        for rank in range(k):
            path_logprob = parent_logprob + proposals[row, rank].logprob
            if path_logprob <= worst or path_logprob < log_floor:
                break  # nor are the less probable ones of this row enough
            node = add_child(tree, parent, rank, proposals)
            at = num_best
            if num_best == budget:
                at -= 1
            else:
                num_best += 1
            while at > 0 and tree.path_logprob[work.order[at - 1]] < path_logprob:
                work.order[at] = work.order[at - 1]
                at -= 1
            work.order[at] = node
            if num_best == budget:
                worst = tree.path_logprob[work.order[budget - 1]]
    if level >= params[_DEPTH]:
        return 0
    # Of the new nodes the k best, if they are among the best of all; below the last of these there is no room.
    num_next = 0
    for place in range(min(num_best, budget - 1)):
        if work.order[place] >= first:
            work.frontier[num_next] = work.order[place]
            num_next += 1
            if num_next == k:
                break
    return num_next


@compiled
def prune(params: Floats, tree: Tree, work: Workspace) -> None:
    """Keep the ``budget`` best candidates, as ``grow`` has ranked them: of equal ones those that came first, so that
    parents stay.
    """
    budget = int(params[_BUDGET])
    if tree.size[0] - 1 <= budget:
        return
    work.mark[: tree.size[0]] = 0
    for place in range(budget):
        work.mark[work.order[place]] = 1
    keep_marked(tree, work.mark)
