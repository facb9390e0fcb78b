"""Which draft tokens are accepted: the walk down the tree along the target's own tokens (DESIGN section 5)."""

from __future__ import annotations

from numba import njit

from autotune.trees.tree import ROOT, Ints, Tree


@njit(cache=True)
def find_child(tree: Tree, node: int, token: int) -> int:
    """The child of ``node`` that holds ``token``, or -1."""
    for child in range(node + 1, tree.size[0]):
        if tree.parent[child] == node and tree.token[child] == token:
            return child
    return -1


@njit(cache=True)
def accept_path(tree: Tree, target_token: Ints, path: Ints) -> int:
    """Walk from the root while the tree holds the target's token; return the accepted length τ.

    ``target_token[node]`` is the token the target emits after ``node``. The accepted nodes are written to ``path[:τ]``;
    the token after the last of them, ``target_token[path[τ - 1]]`` (of the root where τ = 0), comes free with the
    verification.
    """
    node, length = ROOT, 0
    while True:
        child = find_child(tree, node, target_token[node])
        if child < 0:
            return length
        path[length] = child
        length += 1
        node = child
