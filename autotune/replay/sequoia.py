"""Sequoia's dynamic programme: the static trees with the highest expected number of accepted tokens, for every size and
depth (Sequoia, section 3.1: the acceptance of a child depends on its rank alone).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numba import njit

from autotune.replay.trace import Trace
from autotune.trees.static import MAX_RANK, StaticPolicy
from autotune.trees.tree import Floats, Ints


def rank_acceptance(trace: Trace) -> Floats:
    """Share of the answers' tokens that are the draft's proposal of rank 0, 1, ...: [ranks]."""
    rows = trace.packed.root_row
    has_next = rows != trace.packed.unrecorded
    next_token = np.append(trace.forest.answer[1:], -1)[has_next]
    return np.asarray((trace.packed.proposals["token"][rows[has_next]] == next_token[:, None]).mean(0))


def sequoia_trees(acceptance: Floats, *, budgets: Iterable[int], depths: Iterable[int]) -> list[StaticPolicy]:
    """The distinct best trees for every budget (in draft nodes) and depth."""
    budgets, depths = sorted(set(budgets)), sorted(set(depths))
    # Ranks that were never accepted only add nodes.
    ranks = acceptance[: MAX_RANK + 1]
    ranks = ranks[: 1 + max(np.flatnonzero(ranks > 0.0), default=0)]
    expected, first_share = solve(np.ascontiguousarray(ranks, np.float64), budgets[-1], depths[-1])
    trees: dict[frozenset[tuple[int, ...]], StaticPolicy] = {}
    for depth in depths:
        for budget in budgets:
            # The smallest tree with this expectation: nodes beyond what the ranks can fill add nothing.
            size = int(np.argmax(expected[depth, : budget + 2]))
            paths = _paths(first_share, size - 1, depth, 0, ())
            if paths:
                trees.setdefault(frozenset(paths), StaticPolicy(paths=tuple(paths)))
    return list(trees.values())


@njit(cache=True)
def solve(acceptance: Floats, budget: int, depth: int) -> tuple[Floats, Ints]:
    """Solve the dynamic programme.

    Returns:
        expected: [depth + 1, budget + 2]; ``expected[d, n]`` is the largest expected number of tokens emitted by a tree
            of n nodes, its root included, with d levels below the root.
        first_share: [depth + 1, ranks + 1, budget + 1]; of m nodes shared among the subtrees of ranks r, r + 1, ... of
            a node with d levels below it, the subtree of rank r gets ``first_share[d, r, m]``.
    """
    num_ranks = len(acceptance)
    expected = np.ones((depth + 1, budget + 2))
    expected[:, 0] = 0.0
    first_share = np.zeros((depth + 1, num_ranks + 1, budget + 1), np.int64)
    for d in range(1, depth + 1):
        shared = np.zeros((num_ranks + 1, budget + 1))  # the best for ranks r, r + 1, ...
        for r in range(num_ranks - 1, -1, -1):
            for m in range(1, budget + 1):
                for share in range(m, -1, -1):  # among equal shares the largest
                    tokens = acceptance[r] * expected[d - 1, share] + shared[r + 1, m - share]
                    if tokens > shared[r, m]:
                        shared[r, m] = tokens
                        first_share[d, r, m] = share
        expected[d, 1:] = 1.0 + shared[0]
    return expected, first_share


def _paths(first_share: Ints, nodes: int, depth: int, rank: int, parent: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rank paths of ``nodes`` nodes below ``parent``, in the subtrees of ranks ``rank``, ``rank + 1``, ..."""
    if nodes == 0 or depth == 0 or rank == first_share.shape[1] - 1:
        return []
    share = int(first_share[depth, rank, nodes])
    siblings = _paths(first_share, nodes - share, depth, rank + 1, parent)
    if share == 0:
        return siblings
    path = (*parent, rank)
    return [path, *_paths(first_share, share - 1, depth - 1, 0, path), *siblings]
