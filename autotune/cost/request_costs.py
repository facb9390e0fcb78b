"""Costs of a request that single steps do not have: prefills, and the overhead outside the models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import Field

from autotune.cost.surface import robust_deviation, robust_weights
from autotune.files import Document
from autotune.trees.limits import Floats, Ints

LEAST_MS = 1e-6
FIT_ITERATIONS = 5  # of iteratively reweighted least squares
LEAST_SPREAD = 0.01  # relative deviation of samples from a fit
FACTOR = 0.3  # relative deviation of a draft from others that are fitted together, before anything is measured


class _LinearCosts(Document):
    """Costs that are multiplied by counts."""

    held_out_error: float | None = None
    """Median relative error in leave-one-out cross-validation; None with too few samples."""
    uncertainty: float | None = None
    """Relative standard error of a prefill or of a round's overhead; None without samples."""

    @classmethod
    def names(cls) -> list[str]:
        """The fields of the costs."""
        return [name for name in cls.model_fields if name.endswith("_ms")]

    def scaled(self, factor: float) -> Self:
        """The costs where everything takes ``factor`` times as long."""
        return self.model_copy(update={name: factor * getattr(self, name) for name in self.names()})


class PrefillCost(_LinearCosts):
    """Latency of a prefill, ``intercept + per_token * tokens``, and with images ``image + patch * patches``."""

    intercept_ms: float
    per_token_ms: float
    image_ms: float
    """A pass of the vision tower, whatever it reads: on a GPU, the launches of its kernels."""
    patch_ms: float = 0.0
    """Per patch of all images of a prompt."""
    samples: list[tuple[int, int, int, float]]
    """(tokens, 1 with images and 0 without, patches, ms)"""

    def ms(self, tokens: np.ndarray, patches: np.ndarray) -> Floats:
        """Latency of prefills of ``tokens`` [prompts] and images of ``patches`` [prompts], 0 without images."""
        text_ms = self.intercept_ms + self.per_token_ms * tokens
        return np.maximum(text_ms + self.image_ms * (patches > 0) + self.patch_ms * patches, 0.0)


class Overhead(_LinearCosts):
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


Costs = TypeVar("Costs", PrefillCost, Overhead)


def fit_costs(document: type[Costs], samples: Sequence[list[Any]]) -> list[Costs]:
    """Fit the costs of members together, ``ms ~ factor * (counts @ costs)``: the prefills of a network's subnets, which
    have one line, or the overheads of drafts, which are the same work of the runtime. The factor of each is pooled
    towards 1 by its standard error, and the error in cross-validation is of all.

    Args:
        samples: of each member, as in its document. The intercept of a prefill counts once.
    """
    names, num_members = document.names(), len(samples)
    flat = np.array([sample for own in samples for sample in own], np.float64)
    if not len(flat):  # every output ended with its first token
        return [document(samples=[], **dict.fromkeys(names, 0.0)) for _ in samples]
    flat = np.insert(flat, 0, 1.0, axis=1)[:, -len(names) - 1 :]
    counts, ms = flat[:, :-1], np.maximum(flat[:, -1], LEAST_MS)
    of_member = np.repeat(np.arange(num_members), [len(own) for own in samples])
    logs, variances = np.zeros(num_members), np.zeros(num_members)
    for _ in range(FIT_ITERATIONS):
        costs = _fit(counts, ms / np.exp(logs[of_member]))
        residuals = np.log(ms / np.maximum(counts @ costs, 1e-9))
        spread = max(LEAST_SPREAD, robust_deviation(residuals - logs[of_member]))
        weights = np.bincount(of_member, minlength=num_members) / spread**2
        medians = [float(np.median(residuals[of_member == k])) if weights[k] else 0.0 for k in range(num_members)]
        variances = 1 / (weights + FACTOR**-2)
        logs = weights * medians * variances
    error = _left_out_error(counts, ms / np.exp(logs[of_member]))
    own_costs = (np.exp(logs)[:, None] * costs).tolist()
    return [
        document(samples=own, held_out_error=error, uncertainty=deviation, **dict(zip(names, values, strict=True)))
        for own, deviation, values in zip(samples, np.sqrt(variances).tolist(), own_costs, strict=True)
    ]


def _fit(counts: Floats, ms: Floats) -> Floats:
    """Fit ``ms ~ counts @ costs`` by non-negative least squares of relative errors, of which large ones count less."""
    from scipy.optimize import nnls

    # Errors are relative to the prediction: relative to the measurement, a slow run would weigh less than a fast one.
    weight = 1.0 / ms
    costs = np.zeros(counts.shape[1])
    for _ in range(FIT_ITERATIONS):
        costs = nnls(counts * weight[:, None], ms * weight)[0]
        predicted = np.maximum(counts @ costs, 1e-9)
        errors = ms / predicted - 1
        spread = max(LEAST_SPREAD, robust_deviation(errors))
        weight = np.sqrt(robust_weights(errors / spread)) / predicted
    return costs


def _left_out_error(counts: Floats, ms: Floats) -> float | None:
    """Median relative error of the samples, each predicted from all others."""
    errors = []
    for number in range(len(ms)):
        others: Ints = np.flatnonzero(np.arange(len(ms)) != number)
        # Some rows cannot be predicted from the others, for example the row of the only prompt without an image.
        if len(others) and np.linalg.matrix_rank(counts[others]) == np.linalg.matrix_rank(counts):
            errors.append(abs(float(counts[number] @ _fit(counts[others], ms[others])) / float(ms[number]) - 1))
    return float(np.median(errors)) if errors else None
