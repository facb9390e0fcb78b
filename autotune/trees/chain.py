"""``chain``: the draft's most probable token, level after level, to a depth that the draft's confidence may shorten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from autotune.trees.base import TreePolicy, TreeSize
from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_DEPTH, Floats
from autotune.trees.tree import Proposals, Tree, Workspace, add_child

_DEPTH, _P_MIN, _N_MIN = range(3)  # params


class ChainPolicy(TreePolicy):
    """Hyperparameters of ``chain``.

    ``p_min`` and ``n_min`` are those of llama.cpp's ``--spec-draft-p-min`` and ``--spec-draft-n-min``, but that
    llama.cpp takes the probability among the ten most probable tokens. ``assistant_confidence_threshold`` of
    transformers differs from ``p_min`` in two ways: the first token below the threshold is still verified, and the
    threshold changes with the acceptance of earlier rounds where scikit-learn is installed.
    """

    source: ClassVar[str] = "vLLM and SGLang, defaults of their speculative decoding"
    ordered: ClassVar[tuple[tuple[str, str], ...]] = (("n_min", "depth"),)
    as_chain: ClassVar[Mapping[str, Any] | None] = {}

    policy: Literal["chain"] = "chain"
    depth: int = Field(default=5, ge=1, le=MAX_DEPTH)
    p_min: float = Field(default=0.0, ge=0, le=1)
    """Drafting ends before a token whose own probability is less."""
    n_min: int = Field(default=0, ge=0, le=MAX_DEPTH)
    """A draft with fewer tokens is not verified: the round is a plain step that has run the draft."""

    @property
    def size(self) -> TreeSize:
        return TreeSize(depth=self.depth, nodes=self.depth, grown=self.depth, width=1, proposals=1)

    @property
    def changed(self) -> dict[str, Any]:
        """The depth, even where it is the default, and a floor where there is one."""
        return {"depth": self.depth} | super().changed


@compiled
def grow(params: Floats, tree: Tree, work: Workspace, proposals: Proposals) -> int:
    """Add the best child of the last node; returns the number of nodes to expand next (written to the frontier)."""
    parent = work.frontier[0]
    best = proposals[tree.row[parent], 0]
    if best.logprob == -np.inf or best.probability < params[_P_MIN]:
        return 0  # the draft proposes nothing, or is unsure
    node = add_child(tree, parent, 0, proposals)
    work.frontier[0] = node
    return 1 if tree.depth[node] < params[_DEPTH] else 0


@compiled
def prune(params: Floats, tree: Tree) -> None:
    """Drop a draft that is too short to be verified."""
    if tree.size[0] - 1 < params[_N_MIN]:
        tree.size[0] = 1
