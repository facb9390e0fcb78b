"""A token tree as flat arrays, and what every policy and the runtime read off it. Compiled: a round has microseconds
for this.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from autotune.trees.limits import MAX_LEVELS as MAX_LEVELS
from autotune.trees.limits import MAX_STEP as MAX_STEP
from autotune.trees.limits import Floats as Floats
from autotune.trees.limits import Ints as Ints

# The loops run over arrays that outlive them and allocate nothing, so they do without numba's reference counting, which
# took four fifths of their time; and without Python's lock, so that replay runs on all cores.
compiled = njit(cache=True, nogil=True, _nrt=False)
# For what is called for every level: a call hands over the hundred numbers that describe a tree's arrays.
inlined = njit(cache=True, nogil=True, _nrt=False, inline="always")

ROOT = 0  # node 0 is the last committed token; its children have depth 1


class Tree(NamedTuple):
    """Nodes in the order they were added: level by level, so that a parent always stands before its children.

    All arrays have room for the largest tree of a policy before it is pruned; ``size[0]`` entries are in use.
    """

    token: Ints
    parent: Ints
    depth: Ints
    path_logprob: Floats
    """Sum of the draft's log-probabilities from the root's child to this node; 0 at the root."""
    path_probability: Floats
    """The product of its probabilities: kept beside the sum, because an exponential costs more than a node."""
    rank: Ints
    """Place of the node among its parent's proposals, 0 the most probable; -1 at the root."""
    row: Ints
    """Row of ``Proposals`` where the node's own children stand, once it is expanded."""
    kv_slot: Ints
    """Place of the node among those that the draft has read this round; -1: not read."""
    size: Ints


# One of the draft's proposals for a node: a child, and where that child's own children stand, for proposals that are
# all known beforehand, as in replay. Together in memory: replay waits for memory more than for anything else.
CHILD = np.dtype([("logprob", np.float32), ("probability", np.float32), ("token", np.int32), ("row", np.int32)])
Proposals = NDArray[np.void]
"""The most probable children of some nodes, a row each, most probable first: [rows, proposals] of ``CHILD``."""


class Workspace(NamedTuple):
    """Room for a policy's deliberations: allocated once, because an allocation costs as much as a level. Only the frontier
    means something between two calls; ``order`` does to ``eagle2``.
    """

    frontier: Ints
    """Nodes to expand next."""
    logprob: Floats
    rank: Ints
    order: Ints
    """Places, best first."""
    score: Floats
    mark: Ints
    """A number for each node or frontier row: to keep or to drop, how many children to look at."""


def new_tree(num_nodes: int) -> Tree:
    """An empty tree with room for ``num_nodes`` draft nodes; ``plant`` puts the root in."""

    def ints() -> Ints:
        return np.zeros(num_nodes + 1, np.int64)

    def floats() -> Floats:
        return np.zeros(num_nodes + 1)

    return Tree(ints(), ints(), ints(), floats(), floats(), ints(), ints(), ints(), np.zeros(1, np.int64))


def new_workspace(num_nodes: int) -> Workspace:
    """Room for trees of ``num_nodes`` draft nodes."""
    size = num_nodes + 1

    def ints() -> Ints:
        return np.zeros(size, np.int64)

    return Workspace(ints(), np.zeros(size), ints(), ints(), np.zeros(size), ints())


@compiled
def plant(tree: Tree, token: int, row: int) -> None:
    """Make the tree a root alone."""
    tree.token[0] = token
    tree.parent[0] = -1
    tree.depth[0] = 0
    tree.path_logprob[0] = 0.0
    tree.path_probability[0] = 1.0
    tree.rank[0] = -1
    tree.row[0] = row
    tree.kv_slot[0] = -1
    tree.size[0] = 1


@compiled
def add_child(tree: Tree, parent: int, rank: int, proposals: Proposals) -> int:
    """Append a child that was proposed for ``parent`` and return its index; the caller minds the room."""
    node = tree.size[0]
    child = proposals[tree.row[parent], rank]
    tree.token[node] = child.token
    tree.parent[node] = parent
    tree.depth[node] = tree.depth[parent] + 1
    tree.path_logprob[node] = tree.path_logprob[parent] + child.logprob
    tree.path_probability[node] = tree.path_probability[parent] * child.probability
    tree.rank[node] = rank
    tree.row[node] = child.row
    tree.kv_slot[node] = -1
    tree.size[0] = node + 1
    return int(node)


@compiled
def best_first(value: Floats, count: int, num_best: int, order: Ints) -> int:
    """Write the places of the ``num_best`` largest of ``value[:count]`` to ``order``, largest first, equal ones in their
    own order; returns how many there are.
    """
    found = 0
    for place in range(count):
        this = value[place]
        if found == num_best:
            if found == 0 or this <= value[order[found - 1]]:
                continue
            at = found - 1
        else:
            at = found
            found += 1
        while at > 0 and value[order[at - 1]] < this:
            order[at] = order[at - 1]
            at -= 1
        order[at] = place
    return found


@compiled
def add_best_children(
    tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals, num_best: int, log_floor: float
) -> int:
    """Append the ``num_best`` most probable children of the frontier's nodes, by cumulative probability, which must
    exceed the floor; returns how many there are. Of frontier node i the first ``work.mark[i]`` proposals count.

    Most probable first, equal ones in the order of frontier and rank. Every row of proposals is sorted, so the rows are
    merged by a heap of their next candidates: only what is taken is looked at.
    """
    heap, value, next_rank = work.order, work.logprob, work.rank
    size = 0
    for i in range(num_frontier):
        node = work.frontier[i]
        value[i] = tree.path_logprob[node] + proposals[tree.row[node], 0].logprob
        next_rank[i] = 0
        if work.mark[i] > 0 and value[i] > log_floor:
            at = size
            size += 1
            while at > 0 and value[heap[(at - 1) // 2]] < value[i]:  # of equal ones the first is already above
                heap[at] = heap[(at - 1) // 2]
                at = (at - 1) // 2
            heap[at] = i
    added = 0
    while size > 0 and added < num_best:
        i = heap[0]
        node, rank = work.frontier[i], next_rank[i]
        row = tree.row[node]
        add_child(tree, node, rank, proposals)
        added += 1
        # The row's next candidate, or the last row of the heap, sinks from the top.
        next_rank[i] = rank + 1
        if rank + 1 < work.mark[i]:
            value[i] = tree.path_logprob[node] + proposals[row, rank + 1].logprob
        if rank + 1 >= work.mark[i] or not value[i] > log_floor:
            size -= 1
            i = heap[size]
        at = 0
        while True:
            child = 2 * at + 1
            if child >= size:
                break
            if child + 1 < size and _comes_first(value, heap[child + 1], heap[child]):
                child += 1
            if not _comes_first(value, heap[child], i):
                break
            heap[at] = heap[child]
            at = child
        heap[at] = i
    return added


@compiled
def _comes_first(value: Floats, one: int, other: int) -> bool:
    return bool(value[one] > value[other] or (value[one] == value[other] and one < other))


@compiled
def keep_marked(tree: Tree, mark: Ints) -> None:
    """Drop the nodes whose ``mark`` is 0; parents of marked nodes are marked too. ``mark`` is overwritten."""
    size = 1
    mark[ROOT] = ROOT
    for node in range(1, tree.size[0]):
        if mark[node] == 0:
            continue
        tree.token[size] = tree.token[node]
        tree.parent[size] = mark[tree.parent[node]]
        tree.depth[size] = tree.depth[node]
        tree.path_logprob[size] = tree.path_logprob[node]
        tree.path_probability[size] = tree.path_probability[node]
        tree.rank[size] = tree.rank[node]
        tree.row[size] = tree.row[node]
        tree.kv_slot[size] = tree.kv_slot[node]
        mark[node] = size  # where it stands now
        size += 1
    tree.size[0] = size


@compiled
def write_tree_mask(tree: Tree, mask: NDArray[np.float32], closed: float) -> None:
    """The additive attention mask of verification, [nodes, nodes]: 0 where row may see column (itself, its ancestors),
    else ``closed``. Rows and columns beyond the tree fill a prepared size up, and are closed.
    """
    for row in range(mask.shape[0]):
        for column in range(mask.shape[1]):
            mask[row, column] = closed
    for row in range(tree.size[0]):
        node = row
        while node >= 0:
            mask[row, node] = 0.0
            node = tree.parent[node]


@compiled
def write_frontier_mask(tree: Tree, frontier: Ints, mask: NDArray[np.float32], num_slots: int, closed: float) -> None:
    """The additive mask of one draft level, [frontier, slots]: row i is node ``frontier[i]``, a column a place in the
    draft's cache.

    Places count from the end of the committed prefix, which every node sees. The root is part of that prefix. Rows beyond
    the frontier fill a prepared size up, and are closed.
    """
    for row in range(mask.shape[0]):
        for column in range(num_slots):
            mask[row, column] = closed
    for row in range(len(frontier)):
        node = frontier[row]
        while node > ROOT:
            mask[row, tree.kv_slot[node]] = 0.0
            node = tree.parent[node]
