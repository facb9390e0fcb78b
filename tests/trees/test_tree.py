"""Trees, their masks against lists of ancestors, and selections against stable sorts."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.trees.tree import (
    CHILD,
    MAX_STEP,
    ROOT,
    add_best_children,
    add_child,
    keep_marked,
    new_tree,
    new_workspace,
    set_root,
    write_frontier_mask,
    write_tree_mask,
)
from tests.obvious import add_node, ancestors_of, random_tree, tokens_to

MASK_VALUE = -1e9


def test_the_tree_mask_shows_a_node_itself_and_its_ancestors() -> None:
    rng = np.random.default_rng(0)
    for num_nodes in (0, 1, 2, 5, 17, 64, MAX_STEP - 1):
        tree = random_tree(rng, num_nodes, num_tokens=1000)
        size = num_nodes + 1
        expected = np.full((size, size), MASK_VALUE, np.float32)
        for node in range(size):
            for ancestor in ancestors_of(tree, node):
                expected[node, ancestor] = 0.0
        mask = rng.normal(size=(size, size)).astype(np.float32)  # the reused buffer holds an earlier round's mask
        write_tree_mask(tree, mask, MASK_VALUE)
        assert np.array_equal(mask, expected)


def test_the_frontier_mask_shows_a_node_its_own_slot_and_those_of_its_ancestors() -> None:
    """Slots are in the order of evaluation, which need not be the order in the tree."""
    rng = np.random.default_rng(1)
    for num_nodes in (1, 2, 5, 17, 64, 120):
        tree = random_tree(rng, num_nodes, num_tokens=1000)
        tree.kv_slot[1 : num_nodes + 1] = rng.permutation(num_nodes)
        frontier = rng.choice(np.arange(1, num_nodes + 1), size=min(num_nodes, 9), replace=False)
        expected = np.full((len(frontier), num_nodes), MASK_VALUE, np.float32)
        for row, node in enumerate(frontier):
            for ancestor in ancestors_of(tree, int(node)):
                if ancestor != ROOT:
                    expected[row, tree.kv_slot[ancestor]] = 0.0
        mask = rng.normal(size=(len(frontier), num_nodes + 3)).astype(np.float32)
        before = mask[:, num_nodes:].copy()
        write_frontier_mask(tree, frontier, mask, num_nodes, MASK_VALUE)
        assert np.array_equal(mask[:, :num_nodes], expected)
        assert np.array_equal(mask[:, num_nodes:], before), "columns beyond the slots in use stay unchanged"


def test_a_new_root_clears_the_tree() -> None:
    tree = random_tree(np.random.default_rng(2), 20, num_tokens=1000)
    tree.kv_slot[:21] = 9
    set_root(tree, 5, 3)
    node = add_node(tree, ROOT, 6, -0.25, 2, 4)
    assert (node, int(tree.size[0])) == (1, 2)
    assert [int(array[0]) for array in tree] == [5, -1, 0, 0, 1, -1, 3, -1, 2]
    # token, parent, depth, rank, row, slot
    assert [int(array[1]) for array in (*tree[:3], *tree[5:8])] == [6, 0, 1, 2, 4, -1]
    assert tree.path_logprob[1] == -0.25


def test_a_child_has_the_fields_of_its_proposal() -> None:
    tree, proposals = new_tree(3), np.zeros((3, 2), CHILD)
    proposals[2, 1] = (-0.5, 0.6, 44, 7)
    set_root(tree, 5, 2)
    first = add_child(tree, ROOT, 1, proposals)
    tree.row[first] = 2
    second = add_child(tree, first, 1, proposals)
    assert [int(array[second]) for array in (tree.token, tree.parent, tree.depth, tree.rank)] == [44, first, 2, 1]
    assert (tree.row[second], tree.kv_slot[second], tree.path_logprob[second]) == (7, -1, -1.0)
    assert tree.path_probability[second] == pytest.approx(0.36)


def test_the_best_children_are_those_of_a_stable_sort_over_all() -> None:
    """Sorted rows with many ties, a limit on the candidates of each row, and a floor."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        num_parents, k = int(rng.integers(1, 9)), int(rng.integers(1, 7))
        proposals = np.zeros((1 + num_parents, max(k, num_parents)), CHILD)
        proposals["logprob"] = -np.sort(rng.integers(0, 5, proposals.shape)).astype(np.float32)
        proposals["token"] = np.arange(proposals.size).reshape(proposals.shape)
        tree, work = new_tree(200), new_workspace(200)
        set_root(tree, 0, 0)
        parents = [add_child(tree, ROOT, rank, proposals) for rank in range(num_parents)]
        tree.row[parents] = 1 + np.arange(num_parents)
        order = rng.permutation(parents)
        work.frontier[:num_parents] = order
        work.mark[:num_parents] = rng.integers(0, k + 1, num_parents)
        num_best, floor = int(rng.integers(0, 20)), float(rng.choice([-np.inf, -4.5, -4.0]))
        candidates = [
            (float(tree.path_logprob[node] + proposals[tree.row[node], rank]["logprob"]), int(node), rank)
            for i, node in enumerate(order)
            for rank in range(work.mark[i])
        ]
        expected = sorted((c for c in candidates if c[0] > floor), key=lambda c: -c[0])[:num_best]
        first = int(tree.size[0])
        assert add_best_children(tree, work, num_parents, proposals, num_best, floor) == len(expected)
        new = range(first, int(tree.size[0]))
        assert [(float(tree.path_logprob[n]), int(tree.parent[n]), int(tree.rank[n])) for n in new] == expected


def test_dropping_nodes_keeps_the_others_as_they_were() -> None:
    """The kept nodes keep order, fields and ancestors."""
    rng = np.random.default_rng(4)
    for num_nodes in (0, 1, 2, 7, 30, 128):
        tree = random_tree(rng, num_nodes, num_tokens=1000)
        size = num_nodes + 1
        tree.row[1:size], tree.kv_slot[1:size] = rng.integers(0, 99, num_nodes), rng.integers(0, 99, num_nodes)
        mark = np.zeros(size, np.int64)
        for node in rng.permutation(size)[: size // 4]:
            mark[ancestors_of(tree, int(node))] = rng.integers(1, 4)
        kept = [node for node in range(size) if node == ROOT or mark[node]]
        facts = {node: [array[node] for array in (*tree[:1], *tree[2:-1])] for node in kept}
        paths = [tokens_to(tree, node) for node in kept]
        keep_marked(tree, mark)
        assert tree.size[0] == len(kept)
        for index, node in enumerate(kept):
            assert [array[index] for array in (*tree[:1], *tree[2:-1])] == facts[node]
        assert [tokens_to(tree, index) for index in range(len(kept))] == paths
