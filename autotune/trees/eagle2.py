"""``eagle2``: every level expands its ``k`` nodes of highest cumulative probability, and the ``budget`` best of all
candidates are verified (EAGLE-2: dynamic draft trees).

A node that is not among the ``budget`` best candidates so far has no descendant that could be, so it is not expanded,
and drafting ends when no such node is left. The verified tree is EAGLE-2's, for fewer draft tokens.

Levels and nodes are counted as in the paper. The released code calls ``depth`` the levels after the first, and its
total of tokens counts the root: its tree of depth 7 and 60 tokens has ``depth`` 8 and ``budget`` 59 here.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from autotune.trees.base import ForestBounds, TreePolicy, TreeSize
from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, Floats
from autotune.trees.tree import Proposals, Tree, Workspace, add_child, keep_marked

_DEPTH, _K, _BUDGET, _LOG_FLOOR = range(4)  # params


class Eagle2Policy(TreePolicy):
    source: ClassVar[str] = "SpecVLM, section 4.1, after EAGLE-2: 60 tokens, depth 7, top-k 10"

    policy: Literal["eagle2"] = "eagle2"
    depth: int = Field(default=7, ge=1, le=MAX_DEPTH)
    """Draft levels."""
    k: int = Field(default=10, ge=1, le=MAX_CHILDREN)
    """Nodes expanded in a level, and children of each."""
    budget: int = Field(default=60, ge=1, le=MAX_NODES)
    """Limit on the draft nodes sent to verification, the root not counted."""
    floor: float = Field(default=0.0, ge=0, lt=1)
    """Least cumulative probability of a candidate, so that drafting ends where the draft is unsure. EAGLE-2 has none.
    """

    @property
    def size(self) -> TreeSize:
        grown = self.k + (self.depth - 1) * self.k**2
        return TreeSize(self.depth, nodes=min(self.budget, grown), grown=grown, width=self.k, proposals=self.k)

    @property
    def forest_bounds(self) -> ForestBounds:
        return super().forest_bounds.model_copy(update={"beam": self.k, "beam_depth": self.depth})

    def encode(self) -> Floats:
        log_floor = np.log(self.floor) if self.floor else -np.inf
        return np.array([self.depth, self.k, self.budget, log_floor], np.float64)


@compiled
def grow(params: Floats, tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals) -> int:
    """Add the candidates of one level that can be among the best; returns the number of nodes to expand next (written
    to the frontier).
    """
    level = tree.depth[work.frontier[0]] + 1
    k, budget = min(int(params[_K]), proposals.shape[1]), int(params[_BUDGET])
    # ``order`` holds the best nodes of the tree so far, best first: every candidate is ranked as it is added.
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
                break  # the rest of the row is less probable still
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
    # Expand the k best new nodes if they are among the best of all. Nothing below the last of those can be kept.
    num_next = 0
    for i in range(min(num_best, budget - 1)):
        if work.order[i] >= first:
            work.frontier[num_next] = work.order[i]
            num_next += 1
            if num_next == k:
                break
    return num_next


@compiled
def prune(params: Floats, tree: Tree, work: Workspace) -> None:
    """Keep the ``budget`` best candidates as ranked by ``grow``, the earlier of equal ones, so that parents are
    kept.
    """
    budget = int(params[_BUDGET])
    if tree.size[0] - 1 <= budget:
        return
    work.mark[: tree.size[0]] = 0
    for i in range(budget):
        work.mark[work.order[i]] = 1
    keep_marked(tree, work.mark)
