"""Runners, and prepared sizes: what keeps its kernels or graphs per size is given the next size up."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from autotune.errors import UserError
from autotune.trees.tree import MAX_STEP

EAGER = "eager"
RUNNERS: dict[str, str] = {
    EAGER: "forwards as transformers runs them",
    "fixed": "over prepared buffers, but run eagerly: what the other two are compared with",
    "compile": "over prepared buffers, compiled by torch.compile",
    "graph": "over prepared buffers, captured as CUDA graphs",
}
PREPARED_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, MAX_STEP)
"""Tokens of forwards that are prepared, where nothing else is said."""


def check_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """The sizes in order; none: every size is sent as it is.

    Raises:
        UserError: a size below 1 or above the largest forward.
    """
    for size in buckets:
        if not 1 <= size <= MAX_STEP:
            raise UserError(f"buckets are numbers of tokens from 1 to {MAX_STEP}; got {size}; mend that size")
    return tuple(sorted(set(buckets)))


def round_up(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``size`` tokens; ``size`` itself beyond the largest, or without buckets."""
    place = bisect.bisect_left(buckets, size)
    return size if place == len(buckets) else buckets[place]


def sizes_for(runner: str, buckets: Sequence[int]) -> tuple[int, ...]:
    """The sizes that forwards are rounded up to: those asked for, or what the runner needs.

    Raises:
        UserError: impossible sizes.
    """
    return check_buckets(buckets or (() if runner == EAGER else PREPARED_SIZES))
