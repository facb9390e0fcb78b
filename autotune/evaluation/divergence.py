"""The first token at which two decodings of one prompt diverge in reduced precision, and whether rounding explains it.

A batched forward sums in another order than single steps do, and rounding may flip the argmax of a near tie
(``docs/concepts.md``). In float32 on the CPU that must not happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.evaluation.perplexity import answer_logits
from autotune.execution import EAGER
from autotune.modeling.target import Target
from autotune.runtime.token_sampler import TokenSampler

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
    """Largest difference between the logits of single steps and of one forward over the same tokens, at least one unit in
    the last place of the two logits; with sampling over the temperature.
    """

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= _TIE * self.noise

    def __str__(self) -> str:
        verdict = "a near tie" if self.is_near_tie else "not a tie"
        return f"token {self.index}: {self.tokens[0]} or {self.tokens[1]}, margin {self.margin:.3g}, noise {self.noise:.3g}: {verdict}"


@torch.inference_mode()
def first_divergence(
    target: Target,
    inputs: dict[str, Any],
    tokens: list[int],
    other: list[int],
    sampler: TokenSampler | None = None,
    *,
    mode: str = EAGER,
) -> Divergence | None:
    """The first divergence of two answers to a prompt, with the target's margin there; None if they are equal.

    Args:
        sampler: chose the tokens, by default greedily. It is the prompt's own: its prefix is extended.
        mode: of the decoding, in which the single steps run. The one forward is eager, so that the noise includes what
            captured steps round otherwise.

    Raises:
        ValueError: one answer continues where the other ends.
    """
    if tokens == other:
        return None
    pairs = list(zip(tokens, other, strict=False))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        raise ValueError("one answer continues where the other ends; decode both with the same max_new_tokens")
    together = answer_logits(target, inputs, tokens[: index + 1])
    (prompt,) = target.encode(inputs).prompts
    target.reserve(len(prompt) + index)
    target.use_mode(mode)
    try:
        steps = [target.prefill(prompt).logits, *(target.step(token) for token in tokens[:index])]
    finally:
        target.use_mode(EAGER)
    a, b = pairs[index]
    last_place = float(steps[-1][[a, b]].float().abs().max()) * torch.finfo(target.dtype).eps
    sampler = sampler or TokenSampler(device=target.device)
    sampler.append(torch.tensor(tokens[:index], dtype=torch.long, device=sampler.prefix.device))
    (scores,) = sampler.scores(steps[-1][None], np.array([len(prompt) + index])).float()
    noise = max(largest_difference(torch.stack(steps).float(), together.float()), last_place)
    return Divergence(
        index=index,
        tokens=(a, b),
        margin=float((scores[a] - scores[b]).abs()),
        noise=noise / (sampler.temperature or 1.0),
    )


def flips(alone: Tensor, together: Tensor, noise: float) -> list[Divergence]:
    """Every token whose argmax is another one in single steps than in one forward over the same tokens.

    Args:
        alone: logits of single steps, [tokens, vocabulary].
        together: the logits of the forward over all.
        noise: by which each of two logits may be wrong. It is not taken from these logits, whose difference is at least half
            of the margin wherever an argmax flips.
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
