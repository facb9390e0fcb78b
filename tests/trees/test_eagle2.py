"""EAGLE-2 against examples worked by hand; ``test_papers.py`` compares it with the paper on random drafts."""

from __future__ import annotations

from typing import Any

from autotune.trees.policy import parse_policy
from tests.trees.drafts import TreeSession, assert_refused


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


"""With k = 2; (2,) is never a candidate.

    Level 1   (0) 0.6     (1) 0.3
    Level 2   (0,0) 0.33  (0,1) 0.21   (1,0) 0.27  (1,1) 0.03; the two best are (0,0) and (1,0)
    Level 3   (0,0,0) 0.231  (0,0,1) 0.099   (1,0,0) 0.216  (1,0,1) 0.054
"""


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
