"""EAGLE-2 against examples worked by hand; ``test_papers.py`` compares it with the paper on random drafts."""

from __future__ import annotations

from typing import Any

from autotune.trees.policy import parse_policy
from tests.trees.drafts import Ranks, TreeSession, assert_refused, by_table, root_and_below, same_everywhere


def eagle2(**hyperparameters: Any) -> TreeSession:
    return TreeSession("eagle2", **hyperparameters)


# -------- worked examples


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
    """A budget of 3 takes (0), (0,0) and (1) of the table above. After level 2, (1,0) is fourth, so nothing below it
    can be kept. Something below (0,0), the second, could be, but it has 0.231 at best, less than the third: drafting
    ends.
    """
    session = eagle2(depth=7, k=2, budget=3)
    assert session.grow(by_table(TWO_LEVELS)) == [(0,), (1,), (0, 0)]
    assert session.expanded == [[()], [(0,), (1,)], [(0, 0)]]


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


# -------- validation


def test_a_value_out_of_range_is_refused() -> None:
    assert_refused(
        "eagle2",
        ({"depth": 25}, "depth: input should be less than or equal to 24; got 25"),
        ({"k": 17}, "k: input should be less than or equal to 16; got 17"),
        ({"budget": 129}, "budget: input should be less than or equal to 128; got 129"),
        ({"floor": 1.0}, "floor: input should be less than 1; got 1.0"),
        ({"topk": 8}, "unknown key 'topk'"),
    )
