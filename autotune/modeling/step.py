"""Input of a forward pass over a few tokens after the prefix.

The KV cache holds the committed prefix, then the uncommitted tokens of earlier steps of the round, then the tokens of
this step. A token's *offset* is its position relative to the end of the prefix; siblings in a tree have the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from autotune.modeling.masks import TreeMask
from autotune.modeling.transfer import to_host
from autotune.trees.limits import Ints

if TYPE_CHECKING:
    from autotune.modeling.graph_memory import CapturedForward


class Step(NamedTuple):
    """n tokens to evaluate."""

    tokens: NDArray[np.int64]  # [n]
    offsets: Ints  # [n]
    tree_mask: TreeMask
    """Additive mask over the uncommitted tokens and the n tokens, [n, uncommitted + n]. It leaves out the prefix, which
    is visible as far as a layer's attention window reaches.
    """
    only: int | None = None
    """The only token whose logits are needed, because an output head costs time; None: those of all tokens."""
    is_final: bool = False
    """Whether all tokens will be committed, so that nothing need be kept to take them back."""

    @property
    def num_uncommitted(self) -> int:
        return self.tree_mask.shape[1] - len(self.tokens)

    @classmethod
    def single(cls, token: int) -> Step:
        """One token that will be committed."""
        return cls(np.array([token]), np.zeros(1, np.int64), np.zeros((1, 1), np.float32), is_final=True)

    @classmethod
    def causal(cls, tokens: NDArray[np.int64], mask_value: float) -> Step:
        """Consecutive tokens, without uncommitted ones before them."""
        count = len(tokens)
        return cls(tokens, np.arange(count), np.triu(np.full((count, count), mask_value, np.float32), 1))


NOT_FINITE = -2
"""In place of a token: the score that is the largest of its row, or a number that is none, is not finite."""


def best_tokens(scores: Tensor, logits: Tensor) -> Tensor:
    """The token of the largest score in each row of ``scores`` [n, vocabulary], [n]; ``NOT_FINITE`` where that score
    and the logit of the token are not finite.
    """
    largest, tokens = scores.max(-1)
    is_bad = largest - largest != 0.0
    if scores is not logits:  # a processor may force a token by infinity, or replace what is not finite
        is_bad &= ~logits.gather(-1, tokens[:, None])[:, 0].isfinite()
    return tokens.masked_fill(is_bad, NOT_FINITE)


class Evaluated(NamedTuple):
    """The outcome of a step, valid until the next one."""

    logits: Tensor  # [n or 1, vocabulary]
    forward: CapturedForward | None = None
    """The captured step, which has a result on the host too."""

    def greedy_tokens(self) -> Ints:
        """The token of the largest logit in each row, [n]; ``NOT_FINITE`` where logits are not finite."""
        return to_host(best_tokens(self.logits, self.logits)) if self.forward is None else self.forward.wait()
