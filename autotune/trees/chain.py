"""``chain``: the draft's most probable token, level after level, to a fixed depth. What vLLM and SGLang run by default
with depth 5.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import Field

from autotune.files import Document
from autotune.trees.tree import Floats, Ints, Tree, add_child


class ChainPolicy(Document):
    """Hyperparameters of ``chain``."""

    KIND: ClassVar[int] = 0
    policy: Literal["chain"] = "chain"
    depth: int = Field(default=5, ge=1, le=24)

    @property
    def max_nodes(self) -> int:
        """Most draft nodes that a round can send to verification."""
        return self.depth

    @property
    def max_depth(self) -> int:
        """Most draft levels of a round."""
        return self.depth

    @property
    def num_proposals(self) -> int:
        """Children per node that the policy looks at."""
        return 1

    def encode(self) -> Floats:
        """The hyperparameters as the compiled steps read them."""
        return np.array([self.depth], np.float64)


@njit(cache=True)
def grow(params: Floats, tree: Tree, frontier: Ints, tokens: Ints, logprobs: NDArray[np.float32], sources: Ints) -> int:
    """Add the best child of the last node; returns how many nodes to expand next (written to ``frontier``)."""
    parent = frontier[0]
    node = add_child(tree, parent, tokens[0, 0], tree.path_logprob[parent] + logprobs[0, 0], sources[0, 0])
    if tree.depth[node] >= params[0]:
        return 0
    frontier[0] = node
    return 1
