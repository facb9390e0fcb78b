"""``static``: a fixed tree, the same in every round, given by rank paths: ``[0, 2]`` is the third most probable child of
the most probable child of the root. ``search/sequoia.py`` computes the best one.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from autotune.files import Document
from autotune.trees.tree import Floats, Proposals, Tree, Workspace, add_child, compiled

MAX_RANK = 15
NO_TOKEN = -1  # equals no target token; sent to a model as 0


class StaticPolicy(Document):
    """The rank paths of ``static``, in any order; the default is the chain of five."""

    KIND: ClassVar[int] = 4
    policy: Literal["static"] = "static"
    paths: tuple[tuple[int, ...], ...] = Field(
        default=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)), min_length=1, max_length=128
    )

    @field_validator("paths", mode="before")
    @classmethod
    def _lists_are_paths(cls, paths: Any) -> Any:
        """JSON and YAML have lists."""
        if isinstance(paths, list | tuple):
            return tuple(tuple(path) if isinstance(path, list) else path for path in paths)
        return paths

    @model_validator(mode="after")
    def _is_a_tree(self) -> StaticPolicy:
        known = set(self.paths)
        if len(known) < len(self.paths):
            raise ValueError("paths must differ from each other; drop the repeated ones")
        for path in self.paths:
            if not 1 <= len(path) <= 24 or not all(0 <= rank <= MAX_RANK for rank in path):
                raise ValueError(f"a path has 1 to 24 ranks of 0 to {MAX_RANK}; got {list(path)}")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"path {list(path)} needs its parent {list(path[:-1])}; add it")
        return self

    @property
    def ordered_paths(self) -> list[tuple[int, ...]]:
        """The paths level by level, each in the order of its parents, then of ranks."""
        return sorted(self.paths, key=lambda path: (len(path), path))

    @property
    def max_nodes(self) -> int:
        return len(self.paths)

    @property
    def max_grown(self) -> int:
        return len(self.paths)

    @property
    def max_width(self) -> int:
        parents = {path[:-1] for path in self.paths}
        return max(sum(len(parent) == level for parent in parents) for level in range(self.max_depth))

    @property
    def max_depth(self) -> int:
        return max(len(path) for path in self.paths)

    @property
    def num_proposals(self) -> int:
        return 1 + max(max(path) for path in self.paths)

    def encode(self) -> Floats:
        """For node i: its depth, parent, rank, and whether it has children."""
        paths = self.ordered_paths
        node = {(): 0} | {path: place + 1 for place, path in enumerate(paths)}
        parents = {path[:-1] for path in paths}
        rows = [(len(path), node[path[:-1]], path[-1], path in parents) for path in paths]
        return np.array(rows, np.float64).reshape(-1)


@compiled
def grow(params: Floats, tree: Tree, work: Workspace, proposals: Proposals) -> int:
    """One level: its nodes always have the same indices; returns how many have children (written to the frontier).

    Where the draft proposes less than the tree asks for, a node that holds no token keeps the place.
    """
    level = tree.depth[work.frontier[0]] + 1
    num_next = 0
    place = 4 * (tree.size[0] - 1)
    while place < len(params) and params[place] == level:
        parent, rank = int(params[place + 1]), int(params[place + 2])
        node = add_child(tree, parent, rank, proposals)
        if tree.path_logprob[node] == -np.inf:
            tree.token[node] = NO_TOKEN
        if params[place + 3] > 0.0:
            work.frontier[num_next] = node
            num_next += 1
        place += 4
    return num_next
