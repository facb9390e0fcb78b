"""Intervals of ratios, by resampling prompts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bootstrap_ratio(
    above: NDArray[np.float64],
    below: NDArray[np.float64],
    *,
    above_units: NDArray[np.float64] | None = None,
    below_units: NDArray[np.float64] | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % interval of ``sum(above) / sum(below)``, resampling the pairs; where units are given, of the ratio of both
    sums per unit.
    """
    draws = np.random.default_rng(seed).integers(len(above), size=(num_resamples, len(above)))
    ratios = above[draws].sum(1) / below[draws].sum(1)
    if above_units is not None and below_units is not None:
        ratios *= below_units[draws].sum(1) / above_units[draws].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
