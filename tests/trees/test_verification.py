"""Which draft tokens are accepted: the compiled walk against a recursive one."""

from __future__ import annotations

import numpy as np

from autotune.trees.tree import MAX_NODES, ROOT, Ints, Tree, add_child, new_tree, plant
from autotune.trees.verification import accept_path, find_child
from tests.obvious import children_of, random_tree


def accepted_below(tree: Tree, node: int, target_token: Ints) -> list[int]:
    """A child that holds the target's token is accepted, and so is what is accepted below it."""
    for child in children_of(tree, node):
        if tree.token[child] == target_token[node]:
            return [child, *accepted_below(tree, child, target_token)]
    return []


def test_the_accepted_path_of_random_trees() -> None:
    """Few tokens, so that the target's token often is among the children."""
    rng, lengths = np.random.default_rng(0), []
    for _ in range(300):
        tree = random_tree(rng, int(rng.integers(0, 60)), num_tokens=5)
        target_token = rng.integers(0, 5, MAX_NODES)
        path = np.full(MAX_NODES, -1)
        length = accept_path(tree, target_token, path)
        assert path[:length].tolist() == accepted_below(tree, ROOT, target_token)
        lengths.append(length)
    assert min(lengths) == 0 and max(lengths) >= 4, "the random trees no longer cover short and long paths"


def test_nothing_is_accepted_from_a_root_alone() -> None:
    tree = new_tree()
    plant(tree, 3, -1)
    assert accept_path(tree, np.zeros(MAX_NODES, np.int64), np.zeros(MAX_NODES, np.int64)) == 0


def test_a_token_elsewhere_in_the_tree_is_not_accepted() -> None:
    """Node 2 holds what the target says after the root, but it is not the root's child."""
    tree = new_tree()
    plant(tree, 0, -1)
    add_child(tree, ROOT, 1, -0.1, -1)
    add_child(tree, 1, 2, -0.2, -1)
    target_token = np.full(MAX_NODES, 2)
    assert accept_path(tree, target_token, np.zeros(MAX_NODES, np.int64)) == 0
    assert find_child(tree, ROOT, 2) == -1
    assert find_child(tree, 1, 2) == 2


def test_nodes_of_an_earlier_tree_are_not_found() -> None:
    """Planting only resets the size: what the arrays hold behind it is stale."""
    tree = new_tree()
    plant(tree, 0, -1)
    add_child(tree, ROOT, 1, -0.1, -1)
    plant(tree, 0, -1)
    assert find_child(tree, ROOT, 1) == -1
