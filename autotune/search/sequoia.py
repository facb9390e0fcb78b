"""Sequoia's dynamic programme: the static trees that get the most draft tokens accepted, for every size and depth
(Sequoia, section 3.1: acceptance of a child depends on its rank alone).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numba import njit

from autotune.acceptance.trace import Trace
from autotune.trees.static import MAX_RANK, StaticPolicy
from autotune.trees.tree import Floats, Ints


def rank_acceptance(trace: Trace) -> Floats:
    """The share of the answers' tokens that are the draft's most probable proposal, its second, and so on:
    [proposals].
    """
    rows = trace.packed.root_row
    has_next = rows != trace.packed.unrecorded
    following = np.append(trace.forest.answer[1:], -1)[has_next]
    return np.asarray((trace.packed.proposals["token"][rows[has_next]] == following[:, None]).mean(0))


def sequoia_trees(acceptance: Floats, *, budgets: Iterable[int], depths: Iterable[int]) -> list[StaticPolicy]:
    """The best tree for every budget (draft nodes) and depth; trees that are best for several stand once."""
    budgets, depths = sorted(set(budgets)), sorted(set(depths))
    # A rank that was never accepted adds nothing but nodes.
    ranks = acceptance[: MAX_RANK + 1]
    ranks = ranks[: 1 + max(np.flatnonzero(ranks > 0.0), default=0)]
    expected, first_share = plan(np.ascontiguousarray(ranks, np.float64), budgets[-1], depths[-1])
    trees: dict[frozenset[tuple[int, ...]], StaticPolicy] = {}
    for depth in depths:
        for budget in budgets:
            # More nodes than the ranks can fill would change nothing.
            size = int(np.argmax(expected[depth, : budget + 2]))
            paths = _paths(first_share, size - 1, depth, 0, ())
            if paths:
                trees.setdefault(frozenset(paths), StaticPolicy(paths=tuple(paths)))
    return list(trees.values())


@njit(cache=True)
def plan(acceptance: Floats, budget: int, depth: int) -> tuple[Floats, Ints]:
    """``expected[d, n]``: most tokens that a tree of n nodes (the root is one) and d levels below it emits, on average.

    ``first_share[d, r, m]``: of m nodes shared among the subtrees of ranks r, r + 1, ... of a node with d levels below
    it, how many the subtree of rank r gets.
    """
    num_ranks = len(acceptance)
    expected = np.ones((depth + 1, budget + 2))
    expected[:, 0] = 0.0
    first_share = np.zeros((depth + 1, num_ranks + 1, budget + 1), np.int64)
    for d in range(1, depth + 1):
        shared = np.zeros((num_ranks + 1, budget + 1))  # best for ranks r and after
        for r in range(num_ranks - 1, -1, -1):
            for m in range(1, budget + 1):
                for share in range(m, -1, -1):  # of equal ranks the first
                    tokens = acceptance[r] * expected[d - 1, share] + shared[r + 1, m - share]
                    if tokens > shared[r, m]:
                        shared[r, m] = tokens
                        first_share[d, r, m] = share
        expected[d, 1:] = 1.0 + shared[0]
    return expected, first_share


def _paths(first_share: Ints, nodes: int, depth: int, rank: int, parent: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The rank paths of ``nodes`` nodes below ``parent`` in the subtrees of ``rank`` and after."""
    if nodes == 0 or depth == 0 or rank == first_share.shape[1] - 1:
        return []
    share = int(first_share[depth, rank, nodes])
    others = _paths(first_share, nodes - share, depth, rank + 1, parent)
    if share == 0:
        return others
    path = (*parent, rank)
    return [path, *_paths(first_share, share - 1, depth - 1, 0, path), *others]
