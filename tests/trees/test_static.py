"""``static``: the tree of the rank paths, whatever the draft proposes."""

from __future__ import annotations

import numpy as np

from autotune.trees.policy import parse_policy
from tests.trees.drafts import Ranks, TreeSession, assert_is_tree, path_logprob, random_draft, same_everywhere

PATHS: list[Ranks] = [(1, 0), (0,), (2,), (0, 3), (1,), (0, 0), (0, 0, 1), (2, 0), (1, 0, 0)]


def random_paths(rng: np.random.Generator) -> list[Ranks]:
    """Up to 128 paths of a random tree, in random order."""
    paths: list[Ranks] = [()]
    for _ in range(int(rng.integers(1, 129))):
        child = (*paths[rng.integers(len(paths))], int(rng.integers(16)))
        if child not in paths and len(child) <= 24:
            paths.append(child)
    return [paths[i] for i in 1 + rng.permutation(len(paths) - 1)]


def test_random_paths_make_their_tree_under_any_draft() -> None:
    rng, sizes = np.random.default_rng(41), []
    for seed in range(100):
        paths = random_paths(rng)
        session = TreeSession("static", paths=paths)
        draft = random_draft(seed, 0.3)
        tree = session.grow(draft)
        assert tree == sorted(paths, key=lambda path: (len(path), path))
        assert session.grow(random_draft(seed + 1000, 1.0)) == tree
        session.grow(draft)
        assert_is_tree(session.tree)
        for node, path in enumerate(tree, start=1):
            assert session.tree.path_logprob[node] == path_logprob(draft, path)
            assert session.tree.rank[node] == path[-1]
        sizes.append(len(tree))
    assert max(sizes) > 100


def test_limits_follow_from_the_paths() -> None:
    policy = parse_policy({"policy": "static", "paths": PATHS})
    assert (policy.size.nodes, policy.size.grown, policy.size.depth) == (9, 9, 3)
    assert policy.size.width == 3, "(0), (1) and (2) have children"
    assert policy.size.proposals == 4, "rank 3 is the fourth proposal"
    assert parse_policy({"policy": "static", "paths": [[15]]}).size.proposals == 16
    for seed in range(20):
        session = TreeSession("static", paths=random_paths(np.random.default_rng(seed)))
        session.grow(same_everywhere(*[1 / 16] * 16))
        assert session.policy.size.width == max(map(len, session.expanded))
        assert session.policy.size.depth == len(session.expanded)
