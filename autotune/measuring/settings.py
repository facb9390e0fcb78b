"""Settings of the measurement of a cost table: the sizes, and the precision."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from autotune.cost.table import EVERY_ROW, TOKENS
from autotune.execution import EAGER

Size = tuple[int, int]
"""Size of a forward pass: (tokens, KV length)."""

COARSE_TOKENS = (1, 2, 4, 9, 33, 129)
HELD_OUT_TOKENS = (1, 3, 6, 11, 20, 40, 100)


@dataclass(frozen=True)
class CostSettings:
    kv_lengths: tuple[int, ...] = (160, 256, 400)
    """The first and last are always measured, the others where the surface is not linear. Captured steps are measured at the padded
    KV lengths between them.
    """
    held_out_kv_length: int = 208
    """Between the first two; its mirror image is held out too."""
    capture_sizes: tuple[int, ...] = ()
    """Numbers of tokens that inputs are padded to; if there are any, they are the sizes measured."""
    mode: str = EAGER
    """How forwards run (``autotune.execution.MODES``)."""
    least_samples: int = 2
    """Samples of every size of the coarse grid, even after the time limit."""
    min_samples: int = 6
    """Samples of every size, as long as there is time."""
    max_samples: int = 30
    target_error: float = 0.015
    """Relative standard error of a median at which sampling stops."""
    tolerance: float = 0.02
    """Relative interpolation error at which refinement stops."""
    time_limit_s: float = 90.0
    """For the whole table. Slow models get fewer samples, sizes and prompts."""
    every_row: bool = False
    """Verifications of every number of tokens up to 33 are measured, for a quantized target and on a CPU."""
    seed: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Numbers of tokens of the finest grid."""
        return self.capture_sizes or TOKENS

    @property
    def verified_tokens(self) -> tuple[int, ...]:
        """Numbers of tokens of the finest grid of verifications."""
        return tuple(sorted({*TOKENS, *EVERY_ROW})) if self.every_row and not self.capture_sizes else self.tokens

    @property
    def coarse_tokens(self) -> tuple[int, ...]:
        """Numbers of tokens of the initial grid: all capture sizes, because nothing is interpolated between them."""
        return self.capture_sizes or COARSE_TOKENS

    @property
    def held_out_kv_lengths(self) -> tuple[int, ...]:
        """There are none where steps are captured, because no step lies between two padded KV lengths."""
        if self.mode != EAGER:
            return ()
        return self.held_out_kv_length, self.kv_lengths[0] + self.kv_lengths[-1] - self.held_out_kv_length

    @property
    def held_out(self) -> tuple[Size, ...]:
        """Held-out sizes, between the sizes of the grid; capture sizes differ from the grid in KV length only."""
        lengths = itertools.cycle(self.held_out_kv_lengths)
        return tuple(zip(self.capture_sizes or HELD_OUT_TOKENS, lengths, strict=False))
