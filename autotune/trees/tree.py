"""A token tree as flat arrays, and what every policy and the runtime read off it. Compiled: a round has microseconds
for this.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROOT = 0  # node 0 is the last committed token; its children have depth 1
MAX_NODES = 160  # room of a tree, root included: the largest budget (128) and the nodes pruned from it
MAX_LEVELS = 32


class Tree(NamedTuple):
    """Nodes in the order they were added: level by level, so that a parent always stands before its children.

    All arrays have MAX_NODES entries; ``size[0]`` of them are in use. ``source`` is where a node's own proposals come
    from: a forest node in replay, -1 where there are none.
    """

    token: Ints
    parent: Ints
    depth: Ints
    path_logprob: Floats
    """Sum of the draft's log-probabilities from the root's child to this node; 0 at the root."""
    source: Ints
    size: Ints


def new_tree() -> Tree:
    """An empty tree; ``plant`` puts the root in."""

    def ints() -> Ints:
        return np.zeros(MAX_NODES, np.int64)

    return Tree(ints(), ints(), ints(), np.zeros(MAX_NODES), ints(), np.zeros(1, np.int64))


@njit(cache=True)
def plant(tree: Tree, token: int, source: int) -> None:
    """Make the tree a root alone."""
    tree.token[0] = token
    tree.parent[0] = -1
    tree.depth[0] = 0
    tree.path_logprob[0] = 0.0
    tree.source[0] = source
    tree.size[0] = 1


@njit(cache=True)
def add_child(tree: Tree, parent: int, token: int, path_logprob: float, source: int) -> int:
    """Append a node and return its index; the caller minds the room."""
    node = tree.size[0]
    tree.token[node] = token
    tree.parent[node] = parent
    tree.depth[node] = tree.depth[parent] + 1
    tree.path_logprob[node] = path_logprob
    tree.source[node] = source
    tree.size[0] = node + 1
    return int(node)


@njit(cache=True)
def write_tree_mask(tree: Tree, mask: NDArray[np.float32], closed: float) -> None:
    """The additive attention mask of verification, [nodes, nodes]: 0 where row may see column (itself, its ancestors),
    else ``closed``.
    """
    for row in range(tree.size[0]):
        for column in range(tree.size[0]):
            mask[row, column] = closed
        node = row
        while node >= 0:
            mask[row, node] = 0.0
            node = tree.parent[node]


@njit(cache=True)
def write_frontier_mask(
    tree: Tree, frontier: Ints, slot: Ints, mask: NDArray[np.float32], num_slots: int, closed: float
) -> None:
    """The additive mask of one draft level, [frontier, slots]: row i is node ``frontier[i]``, ``slot[node]`` its place
    in the draft's cache.

    Places count from the end of the committed prefix, which every node sees. The root is part of that prefix.
    """
    for row in range(len(frontier)):
        for column in range(num_slots):
            mask[row, column] = closed
        node = frontier[row]
        while node > ROOT:
            mask[row, slot[node]] = 0.0
            node = tree.parent[node]
