"""The masks that let one forward evaluate a whole tree, against each node's list of ancestors."""

from __future__ import annotations

import numpy as np

from autotune.trees.tree import MAX_NODES, ROOT, add_child, new_tree, plant, write_frontier_mask, write_tree_mask
from tests.obvious import ancestors_of, random_tree

CLOSED = -1e9


def test_the_tree_mask_opens_a_node_to_itself_and_its_ancestors() -> None:
    rng = np.random.default_rng(0)
    for num_nodes in (0, 1, 2, 5, 17, 64, MAX_NODES - 1):
        tree = random_tree(rng, num_nodes, num_tokens=1000)
        size = num_nodes + 1
        expected = np.full((size, size), CLOSED, np.float32)
        for node in range(size):
            for ancestor in ancestors_of(tree, node):
                expected[node, ancestor] = 0.0
        mask = rng.normal(size=(size, size)).astype(
            np.float32
        )  # the buffer is reused: what an earlier round left there must not show
        write_tree_mask(tree, mask, CLOSED)
        assert np.array_equal(mask, expected)


def test_the_frontier_mask_opens_the_places_of_a_node_and_its_ancestors_below_the_root() -> None:
    """Places are those of evaluation, which need not be the order in the tree: the draft reads the nodes that are
    expanded, and no others.
    """
    rng = np.random.default_rng(1)
    for num_nodes in (1, 2, 5, 17, 64, 120):
        tree = random_tree(rng, num_nodes, num_tokens=1000)
        places = rng.permutation(num_nodes)
        slot = np.full(MAX_NODES, -1)
        slot[1 : num_nodes + 1] = places
        frontier = rng.choice(np.arange(1, num_nodes + 1), size=min(num_nodes, 9), replace=False)
        expected = np.full((len(frontier), num_nodes), CLOSED, np.float32)
        for row, node in enumerate(frontier):
            for ancestor in ancestors_of(tree, int(node)):
                if ancestor != ROOT:
                    expected[row, slot[ancestor]] = 0.0
        mask = rng.normal(size=(len(frontier), num_nodes + 3)).astype(np.float32)
        before = mask[:, num_nodes:].copy()
        write_frontier_mask(tree, frontier, slot, mask, num_nodes, CLOSED)
        assert np.array_equal(mask[:, :num_nodes], expected)
        assert np.array_equal(mask[:, num_nodes:], before), "columns beyond the places in use belong to nobody"


def test_planting_forgets_the_tree_before() -> None:
    tree = random_tree(np.random.default_rng(2), 20, num_tokens=1000)
    plant(tree, 5, 3)
    node = add_child(tree, ROOT, 6, -0.25, 4)
    assert (node, int(tree.size[0])) == (1, 2)
    assert [int(array[1]) for array in (tree.token, tree.parent, tree.depth, tree.source)] == [6, 0, 1, 4]
    assert (tree.token[0], tree.parent[0], tree.depth[0], tree.path_logprob[0], tree.source[0]) == (5, -1, 0, 0.0, 3)
    assert tree.path_logprob[1] == -0.25


def test_a_new_tree_is_empty() -> None:
    assert new_tree().size[0] == 0
