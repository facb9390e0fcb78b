"""How forward passes run, eagerly or captured, and the capture sizes that captured ones are padded to."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.errors import UserError
from autotune.trees.limits import MAX_STEP

EAGER = "eager"
CUDA_GRAPH = "cuda-graph"
AUTO = "auto"  # the best mode of the device, which is known once the models are loaded
COMPILED = "compiled"
CAPTURED = (CUDA_GRAPH, COMPILED)
"""Forward passes over static buffers, captured as CUDA graphs; ``compiled`` also compiles one function for all layers
and merges products of one input. No device has measured it yet, so that it is never chosen by ``auto``.
"""
MODES = (EAGER, *CAPTURED)
"""Forward passes as transformers runs them, or captured."""
FIXED = "fixed"
"""Over static buffers, but run eagerly: what the tests compare captures with. Users are not offered it."""
STEPS_VERSION = 2
"""Number of the work of captured steps, raised when it changes: their prices are not those of another number."""
DEFAULT_CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, MAX_STEP)
"""Numbers of tokens, for every mode but eager."""
KV_LENGTH_STEP = 256
"""Cache capacities are multiples of it, in tokens."""


def check_capture_sizes(capture_sizes: Sequence[int]) -> tuple[int, ...]:
    """The capture sizes, sorted and without duplicates, if all are possible. With none, inputs are not padded."""
    for size in capture_sizes:
        if not 1 <= size <= MAX_STEP:
            raise UserError(f"capture sizes are numbers of tokens from 1 to {MAX_STEP}; got {size}; fix that size")
    return tuple(sorted(set(capture_sizes)))


def round_up(size: int, capture_sizes: Sequence[int]) -> int:
    """The smallest capture size of at least ``size`` tokens; ``size`` itself if there is none."""
    return next((captured for captured in capture_sizes if captured >= size), size)


def capture_sizes_for(mode: str, capture_sizes: Sequence[int]) -> tuple[int, ...]:
    """The given capture sizes, or the default ones of the mode. Every mode but eager prepares a forward pass for each
    size that occurs, so the default sizes above the largest one given are added.
    """
    sizes = check_capture_sizes(capture_sizes)
    if mode == EAGER:
        return sizes
    return (*sizes, *(size for size in DEFAULT_CAPTURE_SIZES if size > max(sizes, default=0)))


def rounded_capacity(num_tokens: int) -> int:
    """Cache capacity: ``num_tokens`` rounded up to a multiple of ``KV_LENGTH_STEP``."""
    return -(-num_tokens // KV_LENGTH_STEP) * KV_LENGTH_STEP
