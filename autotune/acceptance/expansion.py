"""Which nodes of a forest are expanded while it is recorded, and what they attend to."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from autotune.trees.limits import Floats, Ints


@njit(cache=True)
def choose_expanded(
    root: Ints,
    logprob: Floats,
    is_pinned: NDArray[np.bool_],
    in_nucleus: NDArray[np.bool_],
    log_floor: float,
    width: int,
    beam: int,
    nucleus_width: int,
) -> tuple[Ints, Ints]:
    """The children that ``ForestBounds`` expands at this level, as (frontier row, rank).

    ``logprob`` [rows, proposals] is cumulative. The rows of a root are contiguous.
    """
    num_rows, k = logprob.shape
    rows = np.empty(num_rows * k, np.int64)
    ranks = np.empty(num_rows * k, np.int64)
    count = 0
    begin = 0
    while begin < num_rows:
        end = begin
        while end < num_rows and root[end] == root[begin]:
            end += 1
        order = np.argsort(-logprob[begin:end].copy().reshape(-1), kind="mergesort")
        num_nucleus = 0
        for i in range(len(order)):
            row, rank = begin + order[i] // k, order[i] % k
            is_chosen = i < beam or (i < width and logprob[row, rank] > log_floor)
            if in_nucleus[row, rank] and num_nucleus < nucleus_width:
                num_nucleus += 1
                is_chosen = True
            if is_chosen or is_pinned[row, rank]:
                rows[count], ranks[count] = row, rank
                count += 1
        begin = end
    return rows[:count], ranks[:count]


@njit(cache=True)
def open_columns(tree_mask: NDArray[np.float32], root: Ints, ancestors: Ints, num_roots: int) -> None:
    """Unmask for each node the answer up to its root, its ancestors and itself (the last of ``ancestors``)."""
    for row in range(len(root)):
        for column in range(root[row] + 1):
            tree_mask[row, column] = 0.0
        for offset in ancestors[row]:
            tree_mask[row, num_roots + offset] = 0.0
