"""What the decoding loop asks of a draft, whatever it is made of."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from autotune.trees.tree import Ints, Tree

Proposals = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Tokens and log-probabilities, each [nodes, proposals], most probable first."""


class Draft(Protocol):
    """A draft of one request at a time: ``prefill``, ``append`` the first token, then rounds of ``propose``, level by
    level, and ``commit``.
    """

    kind: str
    vocab_size: int
    visual_keep: float
    """Share of visual tokens that it sees."""
    buckets: tuple[int, ...]
    """Sizes that its forwards are rounded up to; none: every size as it is."""

    def prefill(self, inputs: dict[str, Any], visual_scores: Tensor | None, *, capacity: int) -> None:
        """Read the prompt; ``capacity`` counts the tokens that the request can reach, trees included."""

    def append(self, token: int) -> None:
        """Tell the draft a committed token; it is read with the next root."""

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int) -> Proposals:
        """The most probable children of the frontier's nodes, all of one level. The root's come first in every round.

        Where it reads nodes it notes their places in ``tree.slot``.
        """

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        """End the round: the accepted nodes and the target's own token after them are committed."""
