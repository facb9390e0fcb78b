"""Prepared sizes: a device that keeps its kernels or graphs per size is given the next size up."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from autotune.errors import UserError
from autotune.trees.tree import MAX_STEP


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
