"""Settings of the measurement of a cost table: the sizes, and the precision."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost.table import EVERY_ROW, TOKENS
from autotune.documents.execution import EAGER

Size = tuple[int, int]
"""Size of a forward pass: (tokens, KV length)."""

COARSE_TOKENS = (1, 2, 4, 9, 33, 129)


@dataclass(frozen=True)
class CostSettings:
    kv_lengths: tuple[int, ...] = (160, 256, 400)
    capture_sizes: tuple[int, ...] = ()
    """Numbers of tokens that inputs are padded to; if there are any, they are the sizes measured."""
    mode: str = EAGER
    """How forwards run (``autotune.documents.execution.MODES``)."""
    least_samples: int = 2
    """Samples of every size of the coarse grid, before further sizes are measured."""
    max_samples: int = 30
    target_error: float = 0.002
    """Standard deviation of every price, times the number of its steps in a typical round, in plain steps, at which
    sampling stops.
    """
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
