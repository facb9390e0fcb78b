"""How forward passes run: eager, compiled or captured, and the capture sizes that their inputs are padded to."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from autotune.errors import UserError
from autotune.trees.limits import MAX_STEP

EAGER = "eager"
AUTO = "auto"  # the best mode of the device, which is known once the models are loaded
MODES: dict[str, str] = {
    EAGER: "forwards as transformers runs them",
    "fixed": "over static buffers, but run eagerly: the reference for the other two",
    "compile": "over static buffers, compiled by torch.compile; on a GPU then captured as CUDA graphs",
    "cuda-graph": "over static buffers, captured as CUDA graphs",
    "fixed-flex": "as fixed, with attention that reads the KV length from a buffer (flex_attention)",
    "compile-flex": "as compile, with this attention: one capture serves all KV lengths",
    "cuda-graph-flex": "as cuda-graph, with this attention: one capture serves all KV lengths",
}
_FLEX = "-flex"
DEFAULT_CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, MAX_STEP)
"""Numbers of tokens, for every mode but eager."""


def has_flex_attention(mode: str) -> bool:
    """Whether attention of forward passes of this mode reads the KV length from a buffer."""
    return mode.endswith(_FLEX)


def without_flex_attention(mode: str) -> str:
    """The mode that differs in attention alone: ``compile`` of ``compile-flex``."""
    return mode.removesuffix(_FLEX)


def is_captured(mode: str, device_type: str) -> bool:
    """Whether forward passes of this mode become CUDA graphs on a device of this type (``cpu``, ``cuda``)."""
    mode = without_flex_attention(mode)
    return mode == "cuda-graph" or (mode == "compile" and device_type == "cuda")


def check_capture_sizes(capture_sizes: Sequence[int]) -> tuple[int, ...]:
    """The capture sizes, sorted and without duplicates. With none, inputs are not padded.

    Raises:
        UserError: a size below 1 or above the largest forward.
    """
    for size in capture_sizes:
        if not 1 <= size <= MAX_STEP:
            raise UserError(f"capture sizes are numbers of tokens from 1 to {MAX_STEP}; got {size}; fix that size")
    return tuple(sorted(set(capture_sizes)))


def round_up(size: int, capture_sizes: Sequence[int]) -> int:
    """The smallest capture size of at least ``size`` tokens; ``size`` itself if there is none."""
    index = bisect.bisect_left(capture_sizes, size)
    return size if index == len(capture_sizes) else capture_sizes[index]


def capture_sizes_for(mode: str, capture_sizes: Sequence[int]) -> tuple[int, ...]:
    """The given capture sizes, or the default ones of the mode. Every mode but eager prepares a forward pass for each size
    that occurs, so the default sizes above the largest one given are added.

    Raises:
        UserError: a size out of range.
    """
    sizes = check_capture_sizes(capture_sizes)
    if mode == EAGER:
        return sizes
    return (*sizes, *(size for size in DEFAULT_CAPTURE_SIZES if size > max(sizes, default=0)))
