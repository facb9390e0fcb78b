"""Acceptance counts by hand, and against a straightforward count on random trees."""

from __future__ import annotations

from collections import Counter

import numpy as np

from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.tree import ROOT, Tree, new_tree, set_root
from tests.obvious import add_node, children_of, random_tree


def random_walk(rng: np.random.Generator, tree: Tree) -> list[int]:
    """A path from the root that often ends above a leaf."""
    path: list[int] = []
    while (children := children_of(tree, path[-1] if path else ROOT)) and rng.random() < 0.85:
        path.append(int(rng.choice(children)))
    return path


def test_random_rounds_against_a_straightforward_count() -> None:
    """Trees with at most 16 different tokens have ranks of 0 to 15."""
    rng, counts = np.random.default_rng(51), AcceptanceCounts()
    depths: Counter[tuple[int, bool]] = Counter()
    ranks: Counter[tuple[int, bool]] = Counter()
    for _ in range(300):
        tree = random_tree(rng, int(rng.integers(0, 60)), num_tokens=int(rng.integers(2, 17)))
        path = random_walk(rng, tree)
        counts.observe(tree, np.array(path, np.int64))
        accepted = set(path)
        for node in [ROOT, *path]:
            children = children_of(tree, node)
            for child in children:
                ranks[int(tree.rank[child]), child in accepted] += 1
            if children:
                depths[int(tree.depth[node]) + 1, not accepted.isdisjoint(children)] += 1
    for hits, table in ((depths, counts.by_depth), (ranks, counts.by_rank)):
        expected = np.zeros_like(table)
        for (row, is_accepted), count in hits.items():
            expected[row] += (count, count * is_accepted)
        assert np.array_equal(table, expected)
    assert counts.by_depth[6].min() > 0 and counts.by_rank[5, 0] > 0, "the random trees are too small"


def test_the_deepest_tree_and_the_last_rank_fit() -> None:
    tree = new_tree(24)
    set_root(tree, 0, -1)
    for parent in range(24):
        add_node(tree, parent, 0, -1.0, 15, -1)
    counts = AcceptanceCounts()
    counts.observe(tree, np.arange(1, 25))
    assert counts.to_json() == {"by_depth": [[1, 1]] * 24, "by_rank": [[0, 0]] * 15 + [[24, 24]]}
