"""Where two decodings of one prompt part in reduced precision, and whether rounding explains it.

A batched forward adds up in another order than single steps do, which may turn a near tie around (DESIGN section 5). In
float32 on the CPU that must not happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autotune.evaluation.perplexity import answer_logits
from autotune.modeling.target import Target
from autotune.runtime.token_sampler import TokenSampler

_TIE = 2.0  # times the noise: each of the two logits may be off by it


@dataclass(frozen=True)
class Divergence:
    """The first token in which two answers differ."""

    index: int
    """In the answer, from 0."""
    tokens: tuple[int, int]
    margin: float
    """How far apart the scores of the two tokens are, step by step: logits, over the temperature and with the noise of
    the position if they were sampled.
    """
    noise: float
    """The largest difference between scores of single steps and of one forward over the answer up to there, and at least
    one unit in the last place of the two logits.
    """

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= _TIE * self.noise

    def __str__(self) -> str:
        verdict = "a near tie" if self.is_near_tie else "not a tie"
        return f"token {self.index}: {self.tokens[0]} or {self.tokens[1]}, margin {self.margin:.3g}, noise {self.noise:.3g}: {verdict}"


@torch.inference_mode()
def first_divergence(
    target: Target, inputs: dict[str, Any], tokens: list[int], other: list[int], rule: TokenSampler | None = None
) -> Divergence | None:
    """Where two answers to a prompt part, with the target's margin there; None if they are equal. ``rule`` decided the
    tokens, greedy where left out; it may not look at the prefix.
    """
    if tokens == other:
        return None
    pairs = list(zip(tokens, other, strict=False))
    index = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        raise ValueError("one answer ends where the other goes on: they were not asked for the same number of tokens")
    together = answer_logits(target, inputs, tokens[: index + 1])
    (prompt,) = target.encode(inputs).prompts
    target.reserve(len(prompt) + index)
    steps = [target.prefill(prompt).logits, *(target.step(token) for token in tokens[:index])]
    one, two = pairs[index]
    last_place = float(steps[-1][[one, two]].float().abs().max()) * torch.finfo(target.dtype).eps
    rule = rule or TokenSampler(device=target.device)
    positions = len(prompt) + np.arange(index + 1)
    alone, together = (rule.scores(logits, positions).float() for logits in (torch.stack(steps), together))
    difference = torch.where(alone.isfinite() & together.isfinite(), (alone - together).abs(), 0.0)
    return Divergence(
        index=index,
        tokens=(one, two),
        margin=float((alone[-1, one] - alone[-1, two]).abs()),
        noise=max(float(difference.max()), last_place / (rule.temperature or 1.0)),
    )
