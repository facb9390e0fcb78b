"""A token tree as flat arrays, and the compiled operations that policies, replay and the runtime share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_LEVELS as MAX_LEVELS
from autotune.trees.limits import MAX_STEP as MAX_STEP
from autotune.trees.limits import Floats as Floats
from autotune.trees.limits import Ints as Ints

ROOT = 0  # node 0 is the last committed token; its children have depth 1


class Tree(NamedTuple):
    """Nodes in the order in which they were added: level by level, so that a parent precedes its children.

    All arrays have room for the largest tree of a policy before pruning; ``size[0]`` entries are in use.
    """

    token: Ints
    parent: Ints
    depth: Ints
    path_logprob: Floats
    """Sum of the draft's log-probabilities from the root's child to this node; 0 at the root."""
    path_probability: Floats
    """Product of those probabilities, kept beside the sum because an exponential costs more than adding a node."""
    rank: Ints
    """Index of the node among its parent's proposals, 0 the most probable; -1 at the root."""
    row: Ints
    """Row of ``Proposals`` that holds the node's own children, once it is expanded."""
    kv_slot: Ints
    """Index of the node in the draft's KV cache, counted from the end of the prefix; -1 if the draft has not read it.
    """
    size: Ints


# A proposed child, and the row of the child's own children where all proposals are known beforehand, as in replay. One
# record, because replay is bound by memory latency.
CHILD = np.dtype([("logprob", np.float32), ("probability", np.float32), ("token", np.int32), ("row", np.int32)])
Proposals = NDArray[np.void]
"""The most probable children of some nodes, most probable first: [rows, proposals] of ``CHILD``."""


class Retrieved(NamedTuple):
    """Tokens that followed the longest match of a context's end, in text before it."""

    tokens: Ints
    """From the most frequent follower on; -1 where there is none."""
    match_length: int
    """Tokens of the match; 0: nothing matches."""


class Workspace(NamedTuple):
    """Scratch arrays of a policy, allocated once, because an allocation costs as much as a level. Only ``frontier``,
    for ``eagle2`` ``order``, and for ``priced`` ``score`` and ``mark`` keep their contents between two calls.
    """

    frontier: Ints
    """Nodes to expand next."""
    logprob: Floats
    rank: Ints
    order: Ints
    """Indices, best first."""
    score: Floats
    mark: Ints
    """A number for each node or frontier row: whether to keep it, or how many children to look at."""


def new_tree(num_nodes: int) -> Tree:
    """An empty tree with room for a root, which ``set_root`` sets, and ``num_nodes`` draft nodes."""
    ints, floats = np.zeros((6, num_nodes + 1), np.int64), np.zeros((2, num_nodes + 1))
    return Tree(ints[0], ints[1], ints[2], floats[0], floats[1], ints[3], ints[4], ints[5], np.zeros(1, np.int64))


def new_workspace(num_nodes: int) -> Workspace:
    """Room for trees of ``num_nodes`` draft nodes."""
    ints, floats = np.zeros((4, num_nodes + 1), np.int64), np.zeros((2, num_nodes + 1))
    return Workspace(ints[0], floats[0], ints[1], ints[2], floats[1], ints[3])


@compiled
def set_root(tree: Tree, token: int, row: int) -> None:
    tree.token[0], tree.parent[0], tree.depth[0], tree.rank[0] = token, -1, 0, -1
    tree.path_logprob[0], tree.path_probability[0] = 0.0, 1.0
    tree.row[0], tree.kv_slot[0] = row, -1
    tree.size[0] = 1


@compiled
def add_child(tree: Tree, parent: int, rank: int, proposals: Proposals) -> int:
    """Append a child proposed for ``parent`` and return its index. The caller checks that there is room."""
    node = tree.size[0]
    child = proposals[tree.row[parent], rank]
    tree.token[node], tree.parent[node], tree.depth[node] = child.token, parent, tree.depth[parent] + 1
    tree.rank[node] = rank
    tree.path_logprob[node] = tree.path_logprob[parent] + child.logprob
    tree.path_probability[node] = tree.path_probability[parent] * child.probability
    tree.row[node], tree.kv_slot[node] = child.row, -1
    tree.size[0] = node + 1
    return int(node)


@compiled
def best_first(value: Floats, count: int, num_best: int, order: Ints) -> int:
    """Write the indices of the ``num_best`` largest of ``value[:count]`` to ``order``, largest first, the earlier of
    equal ones first; returns their number.
    """
    num_ordered = 0
    for i in range(count):
        this = value[i]
        if num_ordered == num_best:
            if num_ordered == 0 or this <= value[order[num_ordered - 1]]:
                continue
            at = num_ordered - 1
        else:
            at = num_ordered
            num_ordered += 1
        while at > 0 and value[order[at - 1]] < this:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    return num_ordered


@compiled
def add_best_children(
    tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals, num_best: int, log_floor: float
) -> int:
    """Append the ``num_best`` children of the frontier of highest cumulative probability above the floor; returns their
    number. The first ``work.mark[i]`` proposals of frontier node i are candidates.

    They are added most probable first, equal ones in the order of frontier and rank. Every row of proposals is sorted,
    so a heap of each row's next candidate merges the rows and looks at no more candidates than it takes.
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
            while at > 0 and value[heap[(at - 1) // 2]] < value[i]:  # equal ones keep their order
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
        # Replace the heap's top by the row's next candidate, or by the heap's last row, and sift it down.
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
def _comes_first(value: Floats, i: int, j: int) -> bool:
    return bool(value[i] > value[j] or (value[i] == value[j] and i < j))


@compiled
def keep_marked(tree: Tree, mark: Ints) -> None:
    """Drop the nodes whose ``mark`` is 0. Parents of marked nodes must be marked; ``mark`` is overwritten."""
    size = 1
    mark[ROOT] = ROOT
    for node in range(1, tree.size[0]):
        if mark[node] == 0:
            continue
        tree.token[size], tree.parent[size] = tree.token[node], mark[tree.parent[node]]
        tree.depth[size], tree.rank[size] = tree.depth[node], tree.rank[node]
        tree.path_logprob[size], tree.path_probability[size] = tree.path_logprob[node], tree.path_probability[node]
        tree.row[size], tree.kv_slot[size] = tree.row[node], tree.kv_slot[node]
        mark[node] = size  # the node's new index
        size += 1
    tree.size[0] = size


@compiled
def write_tree_mask(tree: Tree, mask: NDArray[np.float32], mask_value: float) -> None:
    """Write the additive attention mask of verification, [nodes, nodes]: 0 for a node itself and its ancestors, else
    ``mask_value``. Rows and columns beyond the tree are padding and fully masked.
    """
    for row in range(mask.shape[0]):
        for column in range(mask.shape[1]):
            mask[row, column] = mask_value
    for row in range(tree.size[0]):
        node = row
        while node >= 0:
            mask[row, node] = 0.0
            node = tree.parent[node]


@compiled
def write_frontier_mask(
    tree: Tree, frontier: Ints, mask: NDArray[np.float32], num_slots: int, mask_value: float
) -> None:
    """Write the additive attention mask of one draft level, [frontier, slots]: 0 for the KV slots of node
    ``frontier[i]`` and its ancestors, else ``mask_value``.

    The prefix, whose last token is the root, is visible to every node and has no columns here. Rows beyond the frontier
    are padding and fully masked.
    """
    for row in range(mask.shape[0]):
        for column in range(num_slots):
            mask[row, column] = mask_value
    for row in range(len(frontier)):
        node = frontier[row]
        while node > ROOT:
            mask[row, tree.kv_slot[node]] = 0.0
            node = tree.parent[node]


@compiled
def write_level(
    tree: Tree,
    frontier: Ints,
    first_slot: int,
    mask_value: float,
    tokens: Ints,
    offsets: Ints,
    sources: Ints,
    mask: NDArray[np.float32],
) -> None:
    """Give the nodes ``frontier``, which have one depth, their KV slots from ``first_slot`` on, and write the input of
    their forward pass: tokens and offsets [n], slots of their parents [n], and the mask as ``write_frontier_mask``. The
    entries beyond the frontier are padding.
    """
    depth = tree.depth[frontier[0]] - 1  # the root ends the prefix, so its children have offset 0
    for row in range(len(tokens)):
        tokens[row], offsets[row], sources[row] = 0, depth, -1
    for row in range(len(frontier)):
        node = frontier[row]
        tree.kv_slot[node] = first_slot + row
        tokens[row], sources[row] = max(0, tree.token[node]), tree.kv_slot[tree.parent[node]]
    write_frontier_mask(tree, frontier, mask, mask.shape[1], mask_value)
