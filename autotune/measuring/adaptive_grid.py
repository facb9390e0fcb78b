"""The sizes of a surface, refined where interpolation is wrong.

A grid begins coarse. In every gap, the sizes are examined that interpolation is most likely to get wrong: the middle, and the
first size after a block of a matrix kernel, where latency may jump. A size whose latency differs from the interpolation by
more than tolerance and noise joins the grid, and the gaps on both sides of it are examined in turn. Held-out sizes, chosen beforehand,
test the surface and never change the grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from autotune.cost.surface import Point, Surface, standard_error
from autotune.measuring.settings import CostSettings, Size

NEGLIGIBLE = 0.05  # plain steps; errors of shorter latencies are relative to it
KERNEL_BLOCK = 8  # tokens; the latency of matrix kernels may jump after multiples of it


class AdaptiveGrid:
    """The sizes and samples of one surface. Samples are in plain steps.

    Args:
        tokens: numbers of tokens of the finest grid.
        coarse_tokens: the numbers of the initial grid, including the first and last.
        kv_lengths: KV lengths of the finest grid; the initial grid has the first and last.
        held_out: test sizes.
        always_examined: numbers of tokens that are examined in every gap, because a kernel may change at any of them.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        coarse_tokens: Sequence[int],
        kv_lengths: Sequence[int],
        held_out: Iterable[Size],
        settings: CostSettings,
        *,
        always_examined: Iterable[int] = (),
    ) -> None:
        self.settings = settings
        self.samples: dict[Size, list[float]] = {}
        self._all_tokens, self._all_lengths = sorted(tokens), sorted(kv_lengths)
        self._coarse, self._always = sorted(coarse_tokens), frozenset(always_examined)
        self._tokens = list(self._coarse)
        self._lengths = sorted({self._all_lengths[0], self._all_lengths[-1]})
        self._held_out = list(held_out)
        self._examined: dict[Size, None] = {}  # in order of addition

    @property
    def sizes(self) -> list[Size]:
        """All sizes to measure."""
        grid = [(n, m) for n in self._tokens for m in self._lengths]
        return list(dict.fromkeys([*grid, *self._held_out, *self._examined]))

    @property
    def coarse_sizes(self) -> list[Size]:
        """The sizes of the initial grid, without which there is no surface."""
        return [(n, m) for n in self._coarse for m in (self._all_lengths[0], self._all_lengths[-1])]

    def lacking(self, num_samples: int, sizes: Iterable[Size] | None = None) -> list[Size]:
        """The sizes, of all that are to be measured unless given, that have fewer samples."""
        chosen = self.sizes if sizes is None else sizes
        return [size for size in chosen if len(self.samples.get(size, ())) < num_samples]

    def noisy(self) -> list[Size]:
        """Sizes whose samples disagree, and that have fewer than the maximum number of them."""
        return [size for size in self._all_noisy() if len(self.samples[size]) < self.settings.max_samples]

    def noisiest(self, count: int) -> list[Size]:
        """``count`` of the sizes whose samples disagree, noisiest first, repeated as needed; empty if there are none."""
        noisy = self._all_noisy()
        noisy.sort(key=lambda size: -_error(self.samples[size]))
        return [noisy[number % len(noisy)] for number in range(count)] if noisy else []

    def _all_noisy(self) -> list[Size]:
        target_error = self.settings.target_error
        return [size for size in self.sizes if self.samples.get(size) and _error(self.samples[size]) > target_error]

    def refine(self) -> bool:
        """Add the examined sizes where interpolation is wrong to the grid. Returns whether there are new sizes to measure."""
        num_sizes = len(self.sizes)
        row = self._lengths[0]  # one row suffices: kernels depend on the number of tokens at every KV length
        line = self._refine_line([(n, row) for n in self._tokens], [(n, row) for n in self._all_tokens], axis=0)
        self._tokens = [n for n, _ in line]
        for low, high in pairwise(self._tokens):
            gap = [n for n in self._all_tokens if low < n < high]
            after_block = [n for n in gap if n % KERNEL_BLOCK == 1 or n in self._always]
            self._examined |= dict.fromkeys((n, row) for n in sorted({*after_block, *_middle(gap)}))
        lengths = set(self._lengths)
        for n in self._coarse:
            column = self._refine_line([(n, m) for m in self._lengths], [(n, m) for m in self._all_lengths], axis=1)
            lengths.update(m for _, m in column)
        self._lengths = sorted(lengths)
        for low, high in pairwise(self._lengths):
            between = _middle([m for m in self._all_lengths if low < m < high])
            self._examined |= dict.fromkeys((n, m) for m in between for n in self._coarse)
        return len(self.sizes) > num_sizes

    def _refine_line(self, chosen: list[Size], line: list[Size], axis: int) -> list[Size]:
        """The chosen sizes of a row or column, and the examined ones that interpolation misses, added one by one."""
        while True:
            excess = {
                size: self._interpolation_excess(size, chosen, axis)
                for size in line
                if size in self._examined and size not in chosen and self.samples.get(size)
            }
            worst = max(excess, key=lambda size: excess[size], default=None)
            if worst is None or excess[worst] <= 0:
                return chosen
            chosen = sorted([*chosen, worst])

    def _interpolation_excess(self, size: Size, chosen: list[Size], axis: int) -> float:
        """Relative error of the interpolation at a size, minus what tolerance and noise explain."""
        coordinates = [sample[axis] for sample in chosen]
        above = int(np.searchsorted(coordinates, size[axis]))
        neighbors = [self.samples[neighbor] for neighbor in chosen[above - 1 : above + 1]]
        medians = [float(np.median(samples)) for samples in neighbors]
        predicted = float(np.interp(size[axis], coordinates[above - 1 : above + 1], medians))
        noise = np.hypot(_error(self.samples[size]), max(map(_error, neighbors)))
        error = abs(predicted - float(np.median(self.samples[size]))) / _scale(self.samples[size])
        return error - max(self.settings.tolerance, 2 * float(noise))

    def surface(self, unit_ms: float = 1.0) -> Surface:
        """The measured surface, with the better model.

        Where time was too short for a whole row or column of the grid, its sizes count as examined.

        Args:
            unit_ms: milliseconds of a sample of 1.
        """

        def points(sizes: Iterable[Size]) -> list[Point]:
            return [
                Point(tokens=n, kv_length=m, samples_ms=[unit_ms * sample for sample in self.samples[n, m]])
                for n, m in sorted(sizes)
            ]

        measured = {size for size, samples in self.samples.items() if samples}
        lengths = [m for m in self._lengths if all((n, m) in measured for n in self._coarse)]
        tokens = [n for n in self._tokens if all((n, m) in measured for m in lengths)]
        grid = {(n, m) for n in tokens for m in lengths}
        held_out = measured.intersection(self._held_out)
        examined = measured.intersection(self.sizes) - grid - held_out
        return Surface(points=points(grid), examined=points(examined), held_out=points(held_out)).with_best_model()


def _scale(samples: Sequence[float]) -> float:
    """The latency that errors are relative to."""
    return max(float(np.median(samples)), NEGLIGIBLE)


def _error(samples: Sequence[float]) -> float:
    """Standard error of the median, relative to ``_scale``."""
    return standard_error(samples) * float(np.median(samples)) / _scale(samples)


def _middle(values: list[int]) -> list[int]:
    return values[len(values) // 2 : len(values) // 2 + 1]
