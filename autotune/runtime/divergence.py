"""Where two decodings of one prompt part in reduced precision, and whether rounding explains it.

A batched forward adds up in another order than single steps do, which may turn a near tie around (DESIGN section 5). In
float32 on the CPU that must not happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autotune.runtime.perplexity import answer_logits
from autotune.runtime.target import Target

_TIE = 2.0  # times the noise: each of the two logits may be off by it


@dataclass(frozen=True)
class Divergence:
    """The first token in which two answers differ."""

    index: int
    """In the answer, from 0."""
    tokens: tuple[int, int]
    margin: float
    """How far apart the target's logits of the two tokens are, step by step."""
    noise: float
    """The largest difference between logits of single steps and of one forward over the answer up to there."""

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= _TIE * self.noise

    def __str__(self) -> str:
        verdict = "a near tie" if self.is_near_tie else "not a tie"
        return f"token {self.index}: {self.tokens[0]} or {self.tokens[1]}, margin {self.margin:.3g}, noise {self.noise:.3g}: {verdict}"


@torch.inference_mode()
def first_divergence(target: Target, inputs: dict[str, Any], tokens: list[int], other: list[int]) -> Divergence | None:
    """Where two greedy answers to a prompt part, with the target's margin there; None if they are equal."""
    if tokens == other:
        return None
    pairs = list(zip(tokens, other, strict=False))
    index = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        raise ValueError("one answer ends where the other goes on: they were not asked for the same number of tokens")
    together = answer_logits(target, inputs, tokens[: index + 1]).float()
    (prompt,) = target.encode(inputs).prompts
    target.reserve(len(prompt) + index)
    steps = [target.prefill(prompt).logits, *(target.step(token) for token in tokens[:index])]
    alone = torch.stack(steps).float()
    one, two = pairs[index]
    return Divergence(
        index=index,
        tokens=(one, two),
        margin=float((alone[-1, one] - alone[-1, two]).abs()),
        noise=float((alone - together).abs().max()),
    )
