"""Logits of the same tokens, computed in two ways: where their argmax differs, and whether rounding explains it.

A batched forward sums in another order than single steps do, and captured steps in another one than eager steps. In
reduced precision, rounding may flip the argmax of a near tie (``docs/concepts.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TIE = 2.0  # in units of the noise, by which each of the two logits may be wrong


@dataclass(frozen=True)
class Divergence:
    """The first token in which two answers differ."""

    index: int
    """Index in the answer, from 0."""
    tokens: tuple[int, int]
    margin: float
    """Difference between the scores of the two tokens in single steps. A score is the logit; with sampling, the logit
    over the temperature plus the noise of the position.
    """
    noise: float
    """Largest difference between the logits of single steps and of one forward over the same tokens, at least one unit
    in the last place of the two logits; with sampling over the temperature.
    """

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= _TIE * self.noise

    def __str__(self) -> str:
        verdict = "a near tie" if self.is_near_tie else "not a tie"
        return f"token {self.index}: {self.tokens[0]} or {self.tokens[1]}, margin {self.margin:.3g}, noise {self.noise:.3g}: {verdict}"


def flips(alone: Tensor, together: Tensor, noise: float) -> list[Divergence]:
    """Every token whose argmax is another one in single steps than in one forward over the same tokens.

    Args:
        alone: logits of single steps, [tokens, vocabulary].
        together: the logits of the forward over all.
        noise: by which each of two logits may be wrong. It is not taken from these logits, whose difference is at least
            half of the margin wherever an argmax flips.
    """
    best_alone, best_together = alone.argmax(-1), together.argmax(-1)
    divergences = []
    for index in (best_alone != best_together).nonzero()[:, 0].tolist():
        a, b = int(best_alone[index]), int(best_together[index])
        margin = float(alone[index, a].float() - alone[index, b].float())
        divergences.append(Divergence(index=index, tokens=(a, b), margin=margin, noise=noise))
    return divergences


def largest_difference(alone: Tensor, together: Tensor) -> float:
    """Between finite scores; 0.0 without any."""
    difference = torch.where(alone.isfinite() & together.isfinite(), (alone - together).abs(), 0.0)
    return float(difference.max()) if difference.numel() else 0.0
