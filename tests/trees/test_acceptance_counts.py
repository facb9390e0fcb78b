"""Acceptance counts by hand, and against a straightforward count on random trees."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.tree import ROOT, Tree, new_tree, set_root
from tests.obvious import add_node, children_of, random_tree


def small_tree() -> Tree:
    """Nodes 1 and 2 below the root, 3 to 5 below node 1, 6 below node 2, 7 below node 4. Ranks have gaps, as in static
    and pruned trees.
    """
    tree = new_tree(7)
    set_root(tree, 0, -1)
    for parent, rank in ((ROOT, 0), (ROOT, 2), (1, 0), (1, 1), (1, 3), (2, 0), (4, 0)):
        add_node(tree, parent, 10 + rank, -1.0, rank, -1)
    return tree


def observed(*paths: list[int]) -> AcceptanceCounts:
    counts = AcceptanceCounts()
    for path in paths:
        counts.observe(small_tree(), np.array(path, np.int64))
    return counts


NOTHING = {"by_depth": [], "by_rank": []}


@pytest.mark.parametrize(
    ("path", "by_depth", "by_rank"),
    [
        # Depth 1 is offered, by children of ranks 0 and 2; deeper nodes are not.
        ([], [[1, 0]], [[1, 0], [0, 0], [1, 0]]),
        # The root offers ranks 0 and 2, node 1 ranks 0, 1 and 3, node 4 rank 0. Depth 4 is not offered.
        ([1, 4, 7], [[1, 1], [1, 1], [1, 1]], [[3, 2], [1, 1], [1, 0], [1, 0]]),
        # Node 3 has no children; nodes of depth 3 elsewhere do not count.
        ([1, 3], [[1, 1], [1, 1]], [[2, 2], [1, 0], [1, 0], [1, 0]]),
        # Node 2 is accepted, node 6 is not.
        ([2], [[1, 1], [1, 0]], [[2, 0], [0, 0], [1, 1]]),
    ],
)
def test_counts_of_a_round_by_hand(path: list[int], by_depth: list[list[int]], by_rank: list[list[int]]) -> None:
    assert observed(path).to_json() == {"by_depth": by_depth, "by_rank": by_rank}


def test_counts_of_requests_are_added() -> None:
    """Also where runs without a draft, which count nothing, are read back."""
    first, second = observed([1, 4]), observed([2], [])
    assert not first.is_empty and AcceptanceCounts().is_empty
    for other in (second, AcceptanceCounts()):
        first.add(AcceptanceCounts.from_json(other.to_json()))
    assert first.to_json() == observed([1, 4], [2], []).to_json()


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
