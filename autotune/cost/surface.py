"""Latency surfaces over (tokens, KV length): measured points, and the models that interpolate them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from pydantic import Field

from autotune.errors import UserError
from autotune.files import Document
from autotune.trees.limits import Floats

MAX_EXTRAPOLATION = 1.5  # of the longest KV length measured
MEDIAN_ERROR = 1.2533  # standard error of a median over the standard error of a mean, for normal samples
MAD_TO_SD = 1.4826  # standard deviation over median absolute deviation, for normal samples
Model = Literal["linear", "steps"]
MODELS: tuple[Model, ...] = ("linear", "steps")
# Numbers of tokens where the latency of matrix kernels changes: after one token, and after whole blocks.
JUMPS = (1, 8, 16, 32, 64)
BENDS = (2, 4, 8, 16, 32, 64)
BLOCKS = (8, 16, 32, 64)


def robust_deviation(samples: Sequence[float]) -> float:
    """Standard deviation estimated from the median absolute deviation, which interruptions do not affect."""
    return MAD_TO_SD * float(np.median(np.abs(np.array(samples) - np.median(samples))))


def standard_error(samples: Sequence[float]) -> float:
    """Relative standard error of the median."""
    median = float(np.median(samples))
    return MEDIAN_ERROR * robust_deviation(samples) / median / len(samples) ** 0.5 if median > 0 else 0.0


def uncertainty(repetitions: Iterable[Sequence[float]], held_out_error: float | None) -> float | None:
    """Relative standard error of a predicted latency, from two independent sources added in quadrature.

    Args:
        repetitions: the samples of every size. The root mean square of the standard errors of their medians counts; sizes
            with a single sample do not count.
        held_out_error: median relative error of the model where it was not fitted, converted to a standard deviation.

    Returns:
        None without repetitions and without a held-out error.
    """
    errors = [standard_error(samples) for samples in repetitions if len(samples) > 1]
    if not errors and held_out_error is None:
        return None
    spread = float(np.mean(np.square(errors))) if errors else 0.0
    return float(np.sqrt(spread + (MAD_TO_SD * (held_out_error or 0.0)) ** 2))


class Point(Document):
    """Samples of a forward that reads ``tokens`` tokens with ``kv_length`` tokens in the KV cache; of a captured one, ``kv_length`` is
    the padded KV length that it attends to.
    """

    tokens: int = Field(ge=1)
    kv_length: int = Field(ge=0)
    samples_ms: list[float] = Field(min_length=1)
    """Measured samples are scaled by the plain steps before and after them (``autotune.measuring.sampling``)."""

    @property
    def latency_ms(self) -> float:
        """The median, because interruptions only ever add time."""
        return float(np.median(self.samples_ms))


class Surface(Document):
    """Latency over (tokens, KV length), by the model that predicts the held-out points better.

    ``linear`` interpolates between the points of a full grid. ``steps`` is scikit-learn's non-negative least squares over
    functions that increase with both. Documents contain the samples; models are fitted when first used.
    """

    points: list[Point] = Field(min_length=1)
    """The full grid."""
    examined: list[Point] = Field(default_factory=list)
    """Other points, at which the linear model was accurate. Only ``steps`` is fitted to them."""
    held_out: list[Point] = Field(default_factory=list)
    """Test points, chosen before the measurement. No model is fitted to them."""
    model: Model = "linear"
    errors: dict[Model, float] = Field(default_factory=dict)
    """Median relative error at the held-out points, by model."""

    def _grid(self) -> tuple[Floats, Floats, Floats]:
        tokens = sorted({point.tokens for point in self.points})
        lengths = sorted({point.kv_length for point in self.points})
        known = {(point.tokens, point.kv_length): point.latency_ms for point in self.points}
        if len(known) != len(tokens) * len(lengths):
            raise UserError(
                f"a cost surface is a full grid; got {len(known)} points for {len(tokens)} x {len(lengths)}; measure again"
            )
        latency = np.array([[known[n, m] for m in lengths] for n in tokens])
        return np.array(tokens, np.float64), np.array(lengths, np.float64), latency

    @property
    def max_tokens(self) -> int:
        return max(point.tokens for point in self.points)

    @property
    def held_out_error(self) -> float | None:
        """Median relative error of ``model``; None without held-out points."""
        return self.errors.get(self.model)

    @property
    def uncertainty(self) -> float | None:
        """Relative standard error of a latency (``uncertainty``)."""
        return uncertainty((point.samples_ms for point in self.measured), self.held_out_error)

    @property
    def measured(self) -> list[Point]:
        return [*self.points, *self.examined, *self.held_out]

    @property
    def num_samples(self) -> int:
        return sum(len(point.samples_ms) for point in self.measured)

    def latency_ms(self, tokens: Floats, kv_length: Floats, *, model: Model | None = None) -> Floats:
        """Latencies [tokens, KV lengths], at least 0, by ``model`` (default: the surface's own).

        KV lengths below the measured range cost as much as the shortest; above it, latency is extrapolated up to
        ``MAX_EXTRAPOLATION``.

        Raises:
            UserError: more tokens than measured, or a KV length beyond the extrapolation.
        """
        grid_tokens, grid_lengths, latency = self._grid()
        if tokens.max() > grid_tokens[-1] or kv_length.max() > MAX_EXTRAPOLATION * grid_lengths[-1]:
            raise UserError(
                f"the cost table was measured up to {grid_tokens[-1]:.0f} tokens and a KV length of {grid_lengths[-1]:.0f}; "
                f"got {tokens.max():.0f} tokens at {kv_length.max():.0f}; measure a larger grid"
            )
        if (model or self.model) == "steps":
            fitted = (*self.points, *self.examined)
            weights = _fit_steps(tuple((p.tokens, p.kv_length, p.latency_ms) for p in fitted))
            return _features(tokens[:, None], np.maximum(kv_length, grid_lengths[0])[None]) @ weights
        by_tokens = np.array([np.interp(tokens, grid_tokens, column) for column in latency.T])  # [grid lengths, tokens]
        result = np.array([np.interp(kv_length, grid_lengths, row) for row in by_tokens.T])
        if len(grid_lengths) > 1:
            slope = (by_tokens[-1] - by_tokens[-2]) / (grid_lengths[-1] - grid_lengths[-2])
            result += np.maximum(slope, 0.0)[:, None] * np.maximum(kv_length - grid_lengths[-1], 0.0)[None]
        return np.maximum(result, 0.0)

    def held_out_errors(self, model: Model | None = None) -> Floats:
        """Relative errors at the held-out points, by ``model`` (default: the surface's own)."""
        sizes = [(np.array([p.tokens]), np.array([p.kv_length])) for p in self.held_out]
        measured_ms = np.array([p.latency_ms for p in self.held_out])
        return np.array([self.latency_ms(n, m, model=model)[0, 0] for n, m in sizes]) / measured_ms - 1.0

    def with_best_model(self) -> Surface:
        """The same points, with the model of the smaller error at the held-out points; ``linear`` without any, or in a tie."""
        if not self.held_out:
            return self.model_copy(update={"model": "linear", "errors": {}})
        errors = {model: float(np.median(np.abs(self.held_out_errors(model)))) for model in MODELS}
        return self.model_copy(update={"model": min(MODELS, key=lambda model: errors[model]), "errors": errors})


def _features(tokens: Floats, kv_length: Floats) -> Floats:
    """Features of the ``steps`` model, [..., features]. Each is non-negative and non-decreasing in tokens and KV length, and so
    is their sum with non-negative weights.
    """
    n, m = np.broadcast_arrays(tokens, kv_length)
    columns = [np.ones(n.shape), n / 128, m / 1024, n * m / (128 * 1024)]
    columns += [np.minimum(n, bend) / bend for bend in BENDS]
    columns += [n > jump for jump in JUMPS]
    columns += [np.ceil(n / block) * block / 128 for block in BLOCKS]
    return np.stack(columns, axis=-1).astype(np.float64)


@lru_cache(maxsize=256)
def _fit_steps(points: tuple[tuple[int, int, float], ...]) -> Floats:
    """Fit the weights of the features to (tokens, KV length, ms) by relative error."""
    from sklearn.linear_model import LinearRegression

    tokens, lengths, ms = (np.array(column, np.float64) for column in zip(*points, strict=True))
    relative = _features(tokens, lengths) / ms[:, None]
    weights: Floats = LinearRegression(positive=True, fit_intercept=False).fit(relative, np.ones(len(ms))).coef_
    return weights
