"""The nodes of a forest that are expanded while it is recorded, and the tokens that they attend to."""

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

    ``logprob`` [rows, proposals] is cumulative. The rows of a root are contiguous. What has no probability is not expanded.
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
            if logprob[row, rank] == -np.inf:
                break
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
def open_columns(tree_mask: NDArray[np.float32], last_answer: Ints, ancestors: Ints, num_roots: int) -> None:
    """Unmask for each token the answer up to ``last_answer``, its ancestors and itself (``ancestors``; -1: none)."""
    for row in range(len(last_answer)):
        tree_mask[row, : last_answer[row] + 1] = 0.0
        for offset in ancestors[row]:
            if offset >= 0:
                tree_mask[row, num_roots + offset] = 0.0
