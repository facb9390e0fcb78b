"""Sequoia's dynamic programme against all small trees, and rank acceptance against a plain count."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from autotune.replay.sequoia import rank_acceptance, sequoia_trees, solve
from autotune.trees.static import StaticPolicy
from tests.sample_documents import random_trace

Tree = frozenset[tuple[int, ...]]
"""Rank paths."""

NUM_RANKS, LARGEST = 3, 6


@functools.cache
def all_trees() -> list[Tree]:
    """All 9,524 trees of up to 6 draft nodes with ranks 0, 1 and 2."""
    levels: list[set[Tree]] = [{frozenset()}]
    for _ in range(LARGEST):
        larger = set()
        for tree in levels[-1]:
            for parent in [(), *tree]:
                children = {(*parent, rank) for rank in range(NUM_RANKS)}
                larger |= {tree | {child} for child in children - tree}
        levels.append(larger)
    return [tree for level in levels for tree in level]


@functools.cache
def counted_trees() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes of each tree by the ranks on their paths [trees, counts of ranks], sizes and depths of the trees."""
    trees = all_trees()
    counts = np.zeros((len(trees), *[LARGEST + 1] * NUM_RANKS))
    for number, tree in enumerate(trees):
        for path in tree:
            counts[number, path.count(0), path.count(1), path.count(2)] += 1
    size = np.array([len(tree) for tree in trees])
    depth = np.array([max(map(len, tree), default=0) for tree in trees])
    return counts.reshape(len(trees), -1), size, depth


def tokens_of_all_trees(acceptance: np.ndarray) -> np.ndarray:
    """Expected tokens of a round with each tree: accepted nodes, and the target's own token."""
    powers = [acceptance[rank] ** np.arange(LARGEST + 1) for rank in range(NUM_RANKS)]
    return 1.0 + counted_trees()[0] @ np.einsum("a,b,c->abc", *powers).reshape(-1)


def tokens_of(policy: StaticPolicy, acceptance: np.ndarray) -> float:
    return 1.0 + sum(float(np.prod(acceptance[list(path)])) for path in policy.paths)


def best_tree(acceptance: np.ndarray, budget: int, depth: int) -> StaticPolicy:
    (tree,) = sequoia_trees(acceptance, budgets=[budget], depths=[depth])
    return tree


def random_acceptances() -> list[np.ndarray]:
    """Acceptances as in traces: mostly decreasing with the rank; some ranks are never accepted."""
    rng, some = np.random.default_rng(71), []
    for number in range(60):
        acceptance = rng.dirichlet([3.0, 1.0, 0.5, 1.0])[:3]
        if number % 3:
            acceptance = np.sort(acceptance)[::-1]
        if number % 5 == 0:
            acceptance = acceptance * (rng.random(3) < 0.6)
        some.append(np.ascontiguousarray(acceptance))
    return [np.array([0.0, 0.5, 0.0]), np.array([0.5, 0.0, 0.3]), np.array([0.1, 0.2, 0.6]), *some]


def test_small_trees_reach_the_plan() -> None:
    """Also where acceptance increases with the rank, or a rank in between is never accepted."""
    _, size, depth = counted_trees()
    for acceptance in random_acceptances():
        if not acceptance.any():
            continue
        tokens = tokens_of_all_trees(acceptance)
        for most_nodes, most_levels in itertools.product(range(1, LARGEST + 1), range(1, LARGEST + 1)):
            trees = sequoia_trees(acceptance, budgets=[most_nodes], depths=[most_levels])
            assert len(trees) == 1, f"no tree for {acceptance}"
            assert trees[0].size.nodes <= most_nodes and trees[0].size.depth <= most_levels
            best = tokens[(size <= most_nodes) & (depth <= most_levels)].max()
            assert tokens_of(trees[0], acceptance) == pytest.approx(best, abs=1e-12)
            is_best = (tokens > best - 1e-12) & (depth <= most_levels)
            assert trees[0].size.nodes == size[is_best].min(), "no node is superfluous"


def test_large_trees_reach_the_plan() -> None:
    acceptance = np.array([0.62, 0.14, 0.06, 0.03, 0.02, 0.01, 0.01, 0.005])
    expected, _ = solve(acceptance, 128, 24)
    for budget, depth in itertools.product((1, 5, 17, 64, 128), (1, 3, 8, 24)):
        tree = best_tree(acceptance, budget, depth)
        assert tree.size.nodes <= budget and tree.size.depth <= depth
        assert tokens_of(tree, acceptance) == pytest.approx(expected[depth, budget + 1])


def test_ranks_are_limited_to_those_of_static_trees() -> None:
    """Traces may have 32 proposals per node, static trees 16."""
    tree = best_tree(np.full(32, 1 / 32), 20, 1)
    assert set(tree.paths) == {(rank,) for rank in range(16)}


def test_rank_acceptance_against_a_plain_count() -> None:
    for seed in range(4):
        trace = random_trace(seed, num_prompts=5)
        forest, hits, num_positions = trace.forest, np.zeros(4), 0
        for prompt in range(trace.num_prompts):
            answer = forest.answer[trace.answer_start[prompt] : trace.answer_start[prompt + 1]]
            for position, next_token in enumerate(answer[1:]):
                proposed = forest.child_token[trace.first_node[prompt] + position].tolist()
                num_positions += 1
                if next_token in proposed:
                    hits[proposed.index(next_token)] += 1
        assert num_positions == trace.num_tokens
        assert rank_acceptance(trace) == pytest.approx(hits / num_positions)
        assert hits.sum() > 0
