"""Latency surfaces over (tokens, KV length): a grid of prices, and what was measured at its points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from autotune.errors import UserError
from autotune.files import Document
from autotune.trees.limits import Floats

MAX_EXTRAPOLATION = 1.5  # of the longest KV length measured
MEDIAN_ERROR = 1.2533  # standard error of a median over the standard error of a mean, for normal samples
DEGREES = 4.0  # of freedom of the t distribution
MAD_TO_SD = 1.4826  # standard deviation over median absolute deviation, for normal samples


def robust_deviation(samples: Sequence[float] | Floats) -> float:
    """Standard deviation estimated from the median absolute deviation, which interruptions do not affect."""
    return MAD_TO_SD * float(np.median(np.abs(np.array(samples) - np.median(samples))))


def robust_weights(deviations: Floats) -> Floats:
    """Weights of errors, given in standard deviations, by Student's t distribution (Lange, Little and Taylor, 1989):
    large ones count less.
    """
    return (DEGREES + 1) / (DEGREES + np.square(deviations))


def standard_error(samples: Sequence[float]) -> float:
    """Relative standard error of the median."""
    median = float(np.median(samples))
    return MEDIAN_ERROR * robust_deviation(samples) / median / len(samples) ** 0.5 if median > 0 else 0.0


class Observation(Document):
    """A measured latency with its relative standard error."""

    ms: float = Field(gt=0)
    error: float = Field(ge=0)


class Point(Document):
    """A forward that reads ``tokens`` tokens with ``kv_length`` tokens in the KV cache."""

    tokens: int = Field(ge=1)
    kv_length: int = Field(ge=0)
    samples_ms: list[float] = Field(default_factory=list)
    """Measured samples are scaled by the plain steps before and after them (``autotune.measuring.sampling``)."""
    observed: Observation | None = None
    """The robust mean of the samples (``autotune.measuring.jobs``)."""
    live: Observation | None = None
    """The time of finalists' rounds near this size."""
    fitted_ms: float | None = Field(default=None, ge=0)
    """The price of the joint fit (``autotune.cost.joint_fit``); None where nothing is fitted: the median of the samples
    is the price.
    """

    @property
    def latency_ms(self) -> float:
        return float(np.median(self.samples_ms)) if self.fitted_ms is None else self.fitted_ms


class Surface(Document):
    """Latency over (tokens, KV length), interpolated linearly between the points of a full grid."""

    points: list[Point] = Field(min_length=1)
    held_out_error: float | None = None
    """Median relative error of the joint fit at the measured sizes, each predicted from all others (leave-one-out);
    None without a fit.
    """
    uncertainty: float | None = None
    """Relative standard deviation of a price in the posterior of the joint fit, root mean square over the points; None
    without a fit.
    """

    @property
    def max_tokens(self) -> int:
        return max(point.tokens for point in self.points)

    @property
    def measured(self) -> list[Point]:
        """The points with samples."""
        return [point for point in self.points if point.samples_ms]

    def latency_ms(self, tokens: Floats, kv_length: Floats) -> Floats:
        """Latencies [tokens, KV lengths], at least 0.

        KV lengths below the measured range cost as much as the shortest; above it, latency is extrapolated up to
        ``MAX_EXTRAPOLATION``.

        Raises:
            UserError: more tokens than measured, or a KV length beyond the extrapolation.
        """
        grid_tokens, grid_lengths = (np.unique([getattr(p, x) for p in self.points]) for x in ("tokens", "kv_length"))
        known = {(point.tokens, point.kv_length): point.latency_ms for point in self.points}
        latency = np.array([[known[n, m] for m in grid_lengths] for n in grid_tokens])
        if tokens.max() > grid_tokens[-1] or kv_length.max() > MAX_EXTRAPOLATION * grid_lengths[-1]:
            raise UserError(
                f"the cost table was measured up to {grid_tokens[-1]:.0f} tokens and a KV length of {grid_lengths[-1]:.0f}; "
                f"got {tokens.max():.0f} tokens at {kv_length.max():.0f}; measure a larger grid"
            )
        by_tokens = np.array([np.interp(tokens, grid_tokens, column) for column in latency.T])  # [grid lengths, tokens]
        result = np.array([np.interp(kv_length, grid_lengths, row) for row in by_tokens.T])
        if len(grid_lengths) > 1:
            slope = (by_tokens[-1] - by_tokens[-2]) / (grid_lengths[-1] - grid_lengths[-2])
            result += np.maximum(slope, 0.0)[:, None] * np.maximum(kv_length - grid_lengths[-1], 0.0)[None]
        return np.maximum(result, 0.0)
