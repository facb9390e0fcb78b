"""``chain``: the draft's most probable token, level after level, to a fixed depth."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from autotune.trees.base import BasePolicy, Limits
from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_DEPTH, Floats
from autotune.trees.tree import Proposals, Tree, Workspace, add_child


class ChainPolicy(BasePolicy):
    """Hyperparameters of ``chain``."""

    KIND: ClassVar[int] = 0
    source: ClassVar[str] = "vLLM and SGLang, defaults of their speculative decoding"

    policy: Literal["chain"] = "chain"
    depth: int = Field(default=5, ge=1, le=MAX_DEPTH)

    @property
    def limits(self) -> Limits:
        return Limits(depth=self.depth, nodes=self.depth, grown=self.depth, width=1, proposals=1)

    @property
    def ordered_paths(self) -> list[tuple[int, ...]]:
        """See ``StaticPolicy.ordered_paths``."""
        return [(0,) * depth for depth in range(1, self.depth + 1)]

    @property
    def changed(self) -> dict[str, Any]:
        """The depth, even where it is the default: it is all that there is to a chain."""
        return self.hyperparameters


@compiled
def grow(params: Floats, tree: Tree, work: Workspace, proposals: Proposals) -> int:
    """Add the best child of the last node; returns the number of nodes to expand next (written to the frontier)."""
    parent = work.frontier[0]
    if proposals[tree.row[parent], 0].logprob == -np.inf:
        return 0  # the draft proposes nothing
    node = add_child(tree, parent, 0, proposals)
    work.frontier[0] = node
    return 1 if tree.depth[node] < params[0] else 0
