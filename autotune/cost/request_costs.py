"""Costs of a request that single steps do not have: prefills, and the overhead outside the models."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from autotune.cost.surface import uncertainty
from autotune.files import Document
from autotune.trees.limits import Floats

FIT_ITERATIONS = 5  # of iteratively reweighted least squares


class PrefillCost(Document):
    """Latency of a prefill, ``intercept + per_token * tokens + image``."""

    intercept_ms: float
    per_token_ms: float
    image_ms: float
    samples: list[tuple[int, int, float]]
    """(tokens, images, ms)"""
    held_out_error: float | None = None
    """Median relative error in leave-one-out cross-validation; None with too few sizes."""

    @property
    def uncertainty(self) -> float | None:
        """Relative standard error of a latency (``autotune.cost.surface.uncertainty``)."""
        return uncertainty(_by_size(self.samples).values(), self.held_out_error)

    def ms(self, tokens: np.ndarray, has_image: np.ndarray) -> Floats:
        latency: Floats = self.intercept_ms + self.per_token_ms * tokens + self.image_ms * has_image
        return np.maximum(latency, 0.0)


def fit_prefill(samples: list[tuple[int, int, float]]) -> PrefillCost:
    """Fit the medians of samples (tokens, images, ms)."""
    by_size = _by_size(samples)
    sizes = np.array([(1, *size) for size in by_size], np.float64)
    (intercept, per_token, image), error = _fit(
        sizes, np.array([np.median(size_samples) for size_samples in by_size.values()])
    )
    return PrefillCost(
        intercept_ms=intercept, per_token_ms=per_token, image_ms=image, samples=samples, held_out_error=error
    )


def _by_size(samples: list[tuple[int, int, float]]) -> dict[tuple[int, int], list[float]]:
    by_size: dict[tuple[int, int], list[float]] = {}
    for num_tokens, num_images, sample in samples:
        by_size.setdefault((num_tokens, num_images), []).append(sample)
    return by_size


class Overhead(Document):
    """Time of a round outside the two models, from real decoding: tree growth, masks, acceptance, compaction."""

    round_ms: float = Field(ge=0)
    level_ms: float = Field(ge=0)
    """Per draft forward."""
    node_ms: float = Field(default=0.0, ge=0)
    """Per verified node."""
    retrieval_ms: float = Field(default=0.0, ge=0)
    """Added to a round of a tree with ``retrieval``."""
    samples: list[tuple[int, int, int, int, float]] = Field(default_factory=list)
    """(rounds, draft forwards, verified nodes, rounds with retrieval, ms) per run."""
    held_out_error: float | None = None
    """Median relative error in leave-one-out cross-validation; None with one run."""

    @property
    def uncertainty(self) -> float | None:
        """Relative standard error of a run's overhead (``autotune.cost.surface.uncertainty``). No run is repeated."""
        return uncertainty((), self.held_out_error)


def fit_overhead(samples: list[tuple[int, int, int, int, float]]) -> Overhead:
    """Fit samples (rounds, draft forwards, verified nodes, rounds with retrieval, ms)."""
    if not samples:  # every output ended with its first token
        return Overhead(round_ms=0.0, level_ms=0.0)
    counts = np.array([row[:4] for row in samples], np.float64)
    (per_round, per_level, per_node, retrieval), error = _fit(counts, np.maximum([row[4] for row in samples], 1e-6))
    return Overhead(
        round_ms=per_round,
        level_ms=per_level,
        node_ms=per_node,
        retrieval_ms=retrieval,
        samples=samples,
        held_out_error=error,
    )


def _fit(counts: Floats, ms: Floats) -> tuple[list[float], float | None]:
    """Fit ``ms ~ counts @ costs`` by non-negative least squares of relative errors.

    Returns:
        The costs, and the median relative error in leave-one-out cross-validation.
    """
    from scipy.optimize import nnls

    def fit(rows: np.ndarray) -> Floats:
        # Errors are relative to the prediction: relative to the measurement, a slow run would weigh less than a fast one.
        weight = 1.0 / ms
        for _ in range(FIT_ITERATIONS):
            costs: Floats = nnls(counts[rows] * weight[rows, None], ms[rows] * weight[rows])[0]
            weight = 1.0 / np.maximum(counts @ costs, 1e-9)
        return costs

    errors = []
    for number in range(len(ms)):
        is_fitted = np.arange(len(ms)) != number
        # Some rows cannot be predicted from the others, for example the row of the only prompt without an image.
        if np.linalg.matrix_rank(counts[is_fitted]) == np.linalg.matrix_rank(counts):
            errors.append(abs(float(counts[number] @ fit(is_fitted)) / float(ms[number]) - 1))
    return fit(np.ones(len(ms), bool)).tolist(), float(np.median(errors)) if errors else None
