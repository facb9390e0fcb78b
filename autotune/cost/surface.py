"""Latency over (tokens, KV length): what was measured, and what is read between the measurements. Plain numpy; one of the
two models that are compared is scikit-learn's, which is imported when it is asked for.

There is no axis of batches: the runtime decodes the rows of a batch one after the other, so every step is of batch 1. A
subnet of a draft has surfaces of its own (see ``DraftCosts``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from pydantic import Field

from autotune.errors import UserError
from autotune.files import Document
from autotune.trees.limits import Floats

REACH = 1.5  # how far beyond the longest KV length measured a price may be extended
Model = Literal["linear", "steps"]
MODELS: tuple[Model, ...] = ("linear", "steps")
# Where matrix kernels change: behind a single token, and behind whole blocks.
JUMPS = (1, 8, 16, 32, 64)
BENDS = (2, 4, 8, 16, 32, 64)
BLOCKS = (8, 16, 32, 64)


class Point(Document):
    """Samples of one step: ``tokens`` read behind ``kv_length`` cached ones."""

    tokens: int = Field(ge=1)
    kv_length: int = Field(ge=0)
    samples_ms: list[float] = Field(min_length=1)

    @property
    def latency_ms(self) -> float:
        """The median: a shared machine's interruptions only ever add."""
        return float(np.median(self.samples_ms))


class Surface(Document):
    """Latency over (tokens, KV length), by the model that predicts the held-out points best: ``linear`` between the points
    of a full grid, or ``steps``, scikit-learn's non-negative least squares over functions that grow with both. A model is
    fitted to the samples when it is first asked for a price: documents hold no fitted numbers.
    """

    points: list[Point] = Field(min_length=1)
    """The grid."""
    examined: list[Point] = Field(default_factory=list)
    """Off the grid, and near enough to it that it was not refined there: ``steps`` is fitted to them as well."""
    held_out: list[Point] = Field(default_factory=list)
    """Chosen before anything was measured, and fitted by nothing: they test the models."""
    model: Model = "linear"
    errors: dict[Model, float] = Field(default_factory=dict)
    """The median relative error at the held-out points, of each model compared."""

    def _grid(self) -> tuple[Floats, Floats, Floats]:
        tokens = sorted({point.tokens for point in self.points})
        lengths = sorted({point.kv_length for point in self.points})
        known = {(point.tokens, point.kv_length): point.latency_ms for point in self.points}
        if len(known) != len(tokens) * len(lengths):
            raise UserError(
                f"a cost surface is a full grid; {len(known)} points do not fill {len(tokens)} x {len(lengths)}; profile again"
            )
        latency = np.array([[known[n, m] for m in lengths] for n in tokens])
        return np.array(tokens, np.float64), np.array(lengths, np.float64), latency

    @property
    def max_tokens(self) -> int:
        return max(point.tokens for point in self.points)

    @property
    def held_out_error(self) -> float | None:
        """The median of the model that is kept; None where nothing was held out."""
        return self.errors.get(self.model)

    @property
    def num_samples(self) -> int:
        return sum(len(point.samples_ms) for point in (*self.points, *self.examined, *self.held_out))

    def latency_ms(self, tokens: Floats, kv_length: Floats, *, model: Model | None = None) -> Floats:
        """Latencies [tokens, kv lengths], never less than 0, by the model that is kept or by another; shorter KV than
        measured costs what the shortest does.

        Raises:
            UserError: more tokens, or a much longer KV cache, than were measured.
        """
        grid_tokens, grid_lengths, latency = self._grid()
        if tokens.max() > grid_tokens[-1] or kv_length.max() > REACH * grid_lengths[-1]:
            raise UserError(
                f"the cost table was measured up to {grid_tokens[-1]:.0f} tokens and a KV length of {grid_lengths[-1]:.0f}; "
                f"{tokens.max():.0f} tokens at {kv_length.max():.0f} are asked for; profile a larger grid"
            )
        if (model or self.model) == "steps":
            fitted = (*self.points, *self.examined)
            weights = _fit_steps(tuple((p.tokens, p.kv_length, p.latency_ms) for p in fitted))
            return _features(tokens[:, None], np.maximum(kv_length, grid_lengths[0])[None]) @ weights
        by_tokens = np.array([np.interp(tokens, grid_tokens, column) for column in latency.T])  # [grid lengths, tokens]
        priced = np.array([np.interp(kv_length, grid_lengths, row) for row in by_tokens.T])
        if len(grid_lengths) > 1:
            slope = (by_tokens[-1] - by_tokens[-2]) / (grid_lengths[-1] - grid_lengths[-2])
            priced += np.maximum(slope, 0.0)[:, None] * np.maximum(kv_length - grid_lengths[-1], 0.0)[None]
        return np.maximum(priced, 0.0)

    def held_out_errors(self, model: Model | None = None) -> Floats:
        """Relative errors at the held-out points, of the model that is kept or of another."""
        return np.array(
            [
                self.latency_ms(np.array([p.tokens]), np.array([p.kv_length]), model=model)[0, 0] / p.latency_ms - 1.0
                for p in self.held_out
            ]
        )

    def with_best_model(self) -> Surface:
        """The same measurements, priced by the model with the smaller error at the held-out points: the linear one where
        nothing was held out, or where it is no worse.
        """
        if not self.held_out:
            return self.model_copy(update={"model": "linear", "errors": {}})
        errors = {model: float(np.median(np.abs(self.held_out_errors(model)))) for model in MODELS}
        return self.model_copy(update={"model": min(MODELS, key=lambda model: errors[model]), "errors": errors})


def _features(tokens: Floats, kv_length: Floats) -> Floats:
    """[..., features] of the ``steps`` model, each of which grows with tokens and KV length or stays: with weights of at
    least 0 a larger step is never cheaper, and nothing costs less than 0.
    """
    n, m = np.broadcast_arrays(tokens, kv_length)
    columns = [np.ones(n.shape), n / 128, m / 1024, n * m / (128 * 1024)]
    columns += [np.minimum(n, bend) / bend for bend in BENDS]
    columns += [n > jump for jump in JUMPS]
    columns += [np.ceil(n / block) * block / 128 for block in BLOCKS]
    return np.stack(columns, axis=-1).astype(np.float64)


@lru_cache(maxsize=256)
def _fit_steps(points: tuple[tuple[int, int, float], ...]) -> Floats:
    """Weights of the features from (tokens, KV length, ms), by relative error."""
    from sklearn.linear_model import LinearRegression

    tokens, lengths, ms = (np.array(column, np.float64) for column in zip(*points, strict=True))
    relative = _features(tokens, lengths) / ms[:, None]
    weights: Floats = LinearRegression(positive=True, fit_intercept=False).fit(relative, np.ones(len(ms))).coef_
    return weights
