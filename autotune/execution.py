"""Runners, and prepared sizes: what keeps its kernels or graphs per size is given the next size up."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from autotune.errors import UserError
from autotune.trees.limits import MAX_STEP

EAGER = "eager"
MODES: dict[str, str] = {
    EAGER: "forwards as transformers runs them",
    "fixed": "over prepared buffers, but run eagerly: what the other two are compared with",
    "compile": "over prepared buffers, compiled by torch.compile",
    "cuda-graph": "over prepared buffers, captured as CUDA graphs",
}
DEFAULT_CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, MAX_STEP)
"""Tokens of forwards that are prepared, where nothing else is said."""


def check_capture_sizes(capture_sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes in order; none: every size is sent as it is.

    Raises:
        UserError: a size below 1 or above the largest forward.
    """
    for size in capture_sizes:
        if not 1 <= size <= MAX_STEP:
            raise UserError(f"buckets are numbers of tokens from 1 to {MAX_STEP}; got {size}; mend that size")
    return tuple(sorted(set(capture_sizes)))


def round_up(size: int, capture_sizes: Sequence[int]) -> int:
    """The smallest bucket that holds ``size`` tokens; ``size`` itself beyond the largest, or without buckets."""
    place = bisect.bisect_left(capture_sizes, size)
    return size if place == len(capture_sizes) else capture_sizes[place]


def capture_sizes_for(mode: str, capture_sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes that forwards are rounded up to: those asked for, or what the runner needs.

    Raises:
        UserError: impossible sizes.
    """
    return check_capture_sizes(capture_sizes or (() if mode == EAGER else DEFAULT_CAPTURE_SIZES))
