"""``static``: a tree of fixed shape, given by rank paths: ``[0, 2]`` is the third most probable child of the most
probable child of the root. ``prediction/sequoia.py`` computes the best one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from autotune.trees.base import ForestBounds, TreePolicy, TreeSize, Tuples
from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, Floats
from autotune.trees.tree import Proposals, Tree, Workspace, add_child

MAX_RANK = MAX_CHILDREN - 1
NO_TOKEN = -1  # equals no target token; a model reads 0 in its place


class StaticPolicy(TreePolicy):
    """The rank paths of ``static``, in any order; the default is the default of ``chain``."""

    source: ClassVar[str] = "Sequoia, optimal tree topology by dynamic programming"
    template_sizes: ClassVar[Mapping[str, int]] = {"budget": MAX_NODES, "depth": MAX_DEPTH}

    policy: Literal["static"] = "static"
    paths: Annotated[tuple[tuple[int, ...], ...], Tuples] = Field(
        default=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)), min_length=1, max_length=MAX_NODES
    )

    @model_validator(mode="after")
    def _is_a_tree(self) -> StaticPolicy:
        known = set(self.paths)
        if len(known) < len(self.paths):
            raise ValueError("paths must differ from each other; drop the repeated ones")
        for path in self.paths:
            if not 1 <= len(path) <= MAX_DEPTH or not all(0 <= rank <= MAX_RANK for rank in path):
                raise ValueError(f"a path has 1 to {MAX_DEPTH} ranks of 0 to {MAX_RANK}; got {list(path)}")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"path {list(path)} needs its parent {list(path[:-1])}; add it")
        return self

    @classmethod
    def largest(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The deepest chain, and then children of the root."""
        chain = [(0,) * depth for depth in range(1, min(values["depth"], values["budget"]) + 1)]
        return {"paths": chain + [(rank,) for rank in range(1, min(10, 1 + values["budget"] - len(chain)))]}

    @property
    def keeps_empty_nodes(self) -> bool:
        return True

    @property
    def size(self) -> TreeSize:
        parents_by_level = Counter(len(parent) for parent in {path[:-1] for path in self.paths})
        return TreeSize(
            depth=max(map(len, self.paths)),
            nodes=len(self.paths),
            grown=len(self.paths),
            width=max(parents_by_level.values()),
            proposals=1 + max(map(max, self.paths)),
        )

    @property
    def forest_bounds(self) -> ForestBounds:
        return ForestBounds(depth=self.size.depth, num_proposals=self.size.proposals)

    @property
    def changed(self) -> dict[str, Any]:
        """The size of the tree, in place of its many paths."""
        return {"nodes": self.size.nodes, "depth": self.size.depth}

    def encode(self) -> Floats:
        """Depth, parent, rank and whether it has children, of every node: level by level, each level in the order of
        parents, then of ranks.
        """
        paths = sorted(self.paths, key=lambda path: (len(path), path))
        node = {(): 0} | {path: index for index, path in enumerate(paths, start=1)}
        parents = {path[:-1] for path in paths}
        rows = [(len(path), node[path[:-1]], path[-1], path in parents) for path in paths]
        return np.array(rows, np.float64).reshape(-1)


@compiled
def grow(params: Floats, tree: Tree, work: Workspace, proposals: Proposals) -> int:
    """Add the nodes of one level, which have the same indices in every round; returns the number of nodes to expand
    next (written to the frontier).
    """
    level = tree.depth[work.frontier[0]] + 1
    num_next = 0
    at = 4 * (tree.size[0] - 1)
    while at < len(params) and params[at] == level:
        parent, rank = int(params[at + 1]), int(params[at + 2])
        node = add_child(tree, parent, rank, proposals)
        if tree.path_logprob[node] == -np.inf:
            tree.token[node] = NO_TOKEN
        if params[at + 3] > 0.0:
            work.frontier[num_next] = node
            num_next += 1
        at += 4
    return num_next
