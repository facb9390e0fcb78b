"""``chain``: the draft's most probable token, level after level, to a fixed depth. What vLLM and SGLang run by default
with depth 5.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from autotune.files import Document
from autotune.trees.tree import Floats, Proposals, Tree, Workspace, add_child, compiled


class ChainPolicy(Document):
    """Hyperparameters of ``chain``."""

    KIND: ClassVar[int] = 0
    policy: Literal["chain"] = "chain"
    depth: int = Field(default=5, ge=1, le=24)

    max_width: ClassVar[int] = 1
    num_proposals: ClassVar[int] = 1

    @property
    def max_nodes(self) -> int:
        return self.depth

    @property
    def max_grown(self) -> int:
        return self.depth

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def ordered_paths(self) -> list[tuple[int, ...]]:
        """As those of ``static``."""
        return [(0,) * depth for depth in range(1, self.depth + 1)]

    def encode(self) -> Floats:
        return np.array([self.depth], np.float64)


@compiled
def grow(params: Floats, tree: Tree, work: Workspace, proposals: Proposals) -> int:
    """Add the best child of the last node; returns how many nodes to expand next (written to the frontier)."""
    parent = work.frontier[0]
    if proposals[tree.row[parent], 0].logprob == -np.inf:
        return 0  # the draft has no idea
    node = add_child(tree, parent, 0, proposals)
    work.frontier[0] = node
    return 1 if tree.depth[node] < params[0] else 0
