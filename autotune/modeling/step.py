"""Input of a forward pass over a few tokens after the prefix.

The KV cache holds the committed prefix, then the uncommitted tokens of earlier steps of the round, then the tokens of
this step. A token's *offset* is its position relative to the end of the prefix; siblings in a tree have the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.modeling.masks import TreeMask
from autotune.trees.limits import Ints


class Step(NamedTuple):
    """n tokens to evaluate."""

    tokens: NDArray[np.int64]  # [n]
    offsets: Ints  # [n]
    tree_mask: TreeMask
    """Additive mask over the uncommitted tokens and the n tokens, [n, uncommitted + n]. It leaves out the prefix, which
    is visible as far as a layer's attention window reaches.
    """
    first_logits: int = 0
    """The token from which on logits are needed: an output head costs time in proportion to tokens and vocabulary."""
    is_final: bool = False
    """Whether all tokens will be committed, so that nothing need be kept to take them back."""

    @property
    def num_uncommitted(self) -> int:
        return self.tree_mask.shape[1] - len(self.tokens)

    @classmethod
    def causal(cls, tokens: NDArray[np.int64], mask_value: float) -> Step:
        """Consecutive tokens, without uncommitted ones before them."""
        count = len(tokens)
        return cls(tokens, np.arange(count), np.triu(np.full((count, count), mask_value, np.float32), 1))
