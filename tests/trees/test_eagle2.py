"""EAGLE-2 against examples worked by hand, and against the procedure of the paper on random drafts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from autotune.trees.eagle2 import Eagle2Policy
from autotune.trees.policy import parse_policy
from tests.trees.drafts import (
    Draft,
    Ranks,
    TreeSession,
    assert_is_tree,
    assert_refused,
    by_table,
    logprobs_of,
    path_logprob,
    random_draft,
    root_and_below,
    same_everywhere,
    tied_draft,
)


def eagle2(**hyperparameters: Any) -> TreeSession:
    return TreeSession("eagle2", **hyperparameters)


# ----------------------------------------------------------------------------------------------------- worked examples


def test_defaults_are_the_settings_of_the_release() -> None:
    """60 tokens, depth 7, top-k 10, read as the papers count; no floor."""
    policy = parse_policy({"policy": "eagle2"})
    assert policy.model_dump() == {"policy": "eagle2", "depth": 7, "k": 10, "budget": 60, "floor": 0.0}
    assert (policy.max_nodes, policy.max_grown, policy.max_width) == (60, 10 + 6 * 100, 10)
    assert (policy.max_depth, policy.num_proposals) == (7, 10)


def test_a_tree_verifies_no_more_nodes_than_it_grows() -> None:
    assert parse_policy({"policy": "eagle2", "depth": 2, "k": 2, "budget": 60}).max_nodes == 2 + 4


TWO_LEVELS: dict[Ranks, list[float]] = {
    (): [0.6, 0.3, 0.1],
    (0,): [0.55, 0.35, 0.1],
    (1,): [0.9, 0.1],
    (2,): [1.0],
    (0, 0): [0.7, 0.3],
    (0, 1): [0.6, 0.4],
    (1, 0): [0.8, 0.2],
}
"""With k = 2; (2,) is never a candidate.

    Level 1   (0) 0.6     (1) 0.3
    Level 2   (0,0) 0.33  (0,1) 0.21   (1,0) 0.27  (1,1) 0.03; the two best are (0,0) and (1,0)
    Level 3   (0,0,0) 0.231  (0,0,1) 0.099   (1,0,0) 0.216  (1,0,1) 0.054
"""


def test_the_k_best_of_a_level_are_expanded_and_the_budget_keeps_the_best_of_all() -> None:
    session = eagle2(depth=3, k=2, budget=100)
    everything = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert session.grow(by_table(TWO_LEVELS)) == everything
    assert session.expanded == [[()], [(0,), (1,)], [(0, 0), (1, 0)]]
    # In order: 0.6, 0.33, 0.3, 0.27, 0.231, 0.216, 0.21, 0.099, 0.054, 0.03.
    ranking = [(0,), (0, 0), (1,), (1, 0), (0, 0, 0), (1, 0, 0), (0, 1), (0, 0, 1), (1, 0, 1), (1, 1)]
    for budget in range(1, 11):
        tree = eagle2(depth=3, k=2, budget=budget).grow(by_table(TWO_LEVELS))
        assert tree == [path for path in everything if path in ranking[:budget]]


def test_a_node_that_cannot_be_among_the_best_is_not_expanded() -> None:
    """A budget of 3 takes (0), (0,0) and (1) of the table above. After level 2, (1,0) is fourth, so nothing below it can be
    kept. Something below (0,0), the second, could be, but it has 0.231 at best, less than the third: drafting ends.
    """
    session = eagle2(depth=7, k=2, budget=3)
    assert session.grow(by_table(TWO_LEVELS)) == [(0,), (1,), (0, 0)]
    assert session.expanded == [[()], [(0,), (1,)], [(0, 0)]]


def test_a_confident_draft_makes_a_chain() -> None:
    assert eagle2(depth=7, k=10, budget=5).grow(same_everywhere(1.0)) == [(0,) * level for level in range(1, 6)]


def test_the_first_of_equally_probable_candidates_is_kept() -> None:
    """The order is by level, then parent, then rank, so that a node precedes its equally probable children."""
    halves = same_everywhere(0.5, 0.5)
    level_2 = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert eagle2(depth=2, k=2, budget=4).grow(halves) == [(0,), (1,), *level_2[:2]]
    assert eagle2(depth=2, k=2, budget=5).grow(halves) == [(0,), (1,), *level_2[:3]]
    # The first two of the four nodes of level 2 are expanded.
    session = eagle2(depth=3, k=2, budget=100)
    session.grow(halves)
    assert session.expanded[2] == level_2[:2]
    # 0.5 of level 1 precedes 0.5 * 1.0 of level 2.
    assert eagle2(depth=3, k=2, budget=2).grow(root_and_below([0.5, 0.5], [1.0])) == [(0,), (1,)]


def test_candidates_of_no_probability_are_none() -> None:
    assert eagle2(depth=4, k=3).grow(same_everywhere()) == []
    session = eagle2(depth=4, k=3)
    assert session.grow(by_table({(): [0.7], (0,): [0.5, 0.5]})) == [(0,), (0, 0), (0, 1)]
    assert session.expanded == [[()], [(0,)], [(0, 0), (0, 1)]]


def test_candidates_below_the_floor_are_left_out() -> None:
    """In the table above 0.099, 0.054 and 0.03 are below 0.2; 0.231, 0.216 and 0.21 are below 0.25."""
    session = eagle2(depth=3, k=2, budget=100, floor=0.2)
    assert session.grow(by_table(TWO_LEVELS)) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]
    session = eagle2(depth=3, k=2, budget=100, floor=0.25)
    assert session.grow(by_table(TWO_LEVELS)) == [(0,), (1,), (0, 0), (1, 0)]
    assert eagle2(depth=3, k=2, floor=0.65).grow(by_table(TWO_LEVELS)) == []


def test_the_floor_ends_drafting_where_the_draft_is_uncertain() -> None:
    """0.6 ** 4 = 0.13 is the last above 0.1; it is expanded, and its children are below."""
    session = eagle2(depth=7, k=1, floor=0.1)
    assert session.grow(same_everywhere(0.6)) == [(0,) * level for level in range(1, 5)]
    assert len(session.expanded) == 5


# -------------------------------------------------------------------------------------------------- the whole procedure


def whole_eagle2(policy: Eagle2Policy, draft: Draft) -> tuple[list[Ranks], list[Ranks]]:
    """All candidates in order of appearance, and those that are verified: the k best of every level are expanded, and all
    candidates are ranked at the end.
    """
    floor = math.log(policy.floor) if policy.floor else -math.inf
    logprob: dict[Ranks, float] = {}
    expanded: list[Ranks] = [()]
    for _ in range(policy.depth):
        level: dict[Ranks, float] = {}
        for parent in expanded:
            for rank, own in enumerate(logprobs_of(draft, parent, policy.k)):
                cumulative = logprob.get(parent, 0.0) + float(own)
                if cumulative > -math.inf and cumulative >= floor:
                    level[*parent, rank] = cumulative
        logprob |= level
        expanded = best(level, policy.k)
    kept = set(best(logprob, policy.budget))
    return list(logprob), [path for path in logprob if path in kept]


def best(logprob: dict[Ranks, float], count: int) -> list[Ranks]:
    """The most probable, of equal ones the first."""
    return sorted(logprob, key=lambda path: -logprob[path])[:count]


def random_hyperparameters(rng: Generator) -> dict[str, Any]:
    return {
        "depth": int(rng.integers(1, 8)),
        "k": int(rng.choice([1, 2, 3, 4, 6, 10])),
        "budget": int(rng.choice([1, 2, 3, 5, 8, 16, 32, 60, 128])),
        "floor": float(rng.choice([0.0, 0.0, 0.001, 0.03, 0.2])),
    }


def random_rounds(num_rounds: int) -> list[tuple[TreeSession, Draft, list[Ranks]]]:
    """Session, draft and tree of one round each; every third draft has many exact ties."""
    rng, rounds = np.random.default_rng(21), []
    for seed in range(num_rounds):
        session = eagle2(**random_hyperparameters(rng))
        draft = tied_draft(seed) if seed % 3 == 0 else random_draft(seed, float(rng.choice([0.03, 0.1, 0.3, 1.0])))
        rounds.append((session, draft, session.grow(draft)))
    return rounds


@pytest.fixture(scope="module")
def rounds() -> list[tuple[TreeSession, Draft, list[Ranks]]]:
    return random_rounds(400)


def test_ending_early_does_not_change_the_verified_tree(rounds: Any) -> None:
    """Nor the order of its nodes, and it never drafts more."""
    num_pruned = num_floored = num_spared = 0
    for session, draft, paths in rounds:
        candidates, expected = whole_eagle2(session.policy, draft)
        assert paths == expected
        assert set(session.grown) <= set(candidates)
        num_pruned += len(expected) < len(candidates)
        num_floored += session.policy.floor > 0 and len(expected) > 3
        num_spared += len(session.grown) < len(candidates)
    assert min(num_pruned, num_floored, num_spared) > 50, "the random trees are too small"


def test_pruning_between_exact_ties() -> None:
    """The last node that is kept is as probable as the first that is not."""
    num_cut = 0
    for seed in range(100):
        draft = tied_draft(seed)
        session = eagle2(depth=5, k=4, budget=9)
        paths = session.grow(draft)
        candidates, expected = whole_eagle2(session.policy, draft)
        assert paths == expected
        left_out = [path_logprob(draft, path) for path in candidates if path not in expected]
        num_cut += bool(left_out) and max(left_out) == min(path_logprob(draft, path) for path in expected)
    assert num_cut > 50, "the drafts have too few ties"


def test_only_nodes_among_the_best_so_far_are_expanded(rounds: Any) -> None:
    """At most k of a level, all of them among the ``budget`` best of the levels so far."""
    for session, draft, _ in rounds:
        policy = session.policy
        candidates, _ = whole_eagle2(policy, draft)
        logprob = {path: path_logprob(draft, path) for path in candidates}
        assert len(session.expanded) <= policy.depth
        for level, nodes in enumerate(session.expanded[1:], start=1):
            known = {path: logprob[path] for path in candidates if len(path) <= level}
            assert len(nodes) <= policy.k
            assert set(nodes) <= set(best(known, policy.budget))


# ---------------------------------------------------------------------------------------------------------- properties


def test_random_trees_are_trees_within_the_budget(rounds: Any) -> None:
    for session, draft, paths in rounds:
        assert_is_tree(session.tree)
        assert len(paths) <= session.policy.max_nodes <= session.policy.budget
        assert len(session.grown) <= session.policy.max_grown
        assert max(map(len, paths), default=0) <= session.policy.depth
        for node, path in enumerate(paths, start=1):
            assert session.tree.path_logprob[node] == path_logprob(draft, path)
            assert session.tree.rank[node] == path[-1] < session.policy.k


def test_random_trees_do_not_depend_on_earlier_rounds(rounds: Any) -> None:
    for (first, draft, paths), (*_, again) in zip(rounds, random_rounds(30), strict=False):
        assert paths == again
        first.grow(same_everywhere(0.4, 0.3, 0.3))
        assert first.grow(draft) == paths


# ---------------------------------------------------------------------------------------------------------- validation


def test_a_value_out_of_range_is_refused() -> None:
    assert_refused(
        "eagle2",
        ({"depth": 0}, "depth: input should be greater than or equal to 1; got 0"),
        ({"depth": 25}, "depth: input should be less than or equal to 24; got 25"),
        ({"k": 0}, "k: input should be greater than or equal to 1; got 0"),
        ({"k": 17}, "k: input should be less than or equal to 16; got 17"),
        ({"budget": 0}, "budget: input should be greater than or equal to 1; got 0"),
        ({"budget": 129}, "budget: input should be less than or equal to 128; got 129"),
        ({"floor": 1.0}, "floor: input should be less than 1; got 1.0"),
        ({"floor": -0.1}, "floor: input should be greater than or equal to 0; got -0.1"),
        ({"topk": 8}, "unknown key 'topk'"),
    )
