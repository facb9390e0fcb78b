"""SAGE against examples worked by hand from the paper's equations, and against a plain implementation of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autotune.trees.policy import parse_policy
from autotune.trees.sage import root_confidence
from autotune.trees.tree import CHILD
from tests.trees.drafts import TreeSession, assert_refused, root_and_below, same_everywhere


def sage(**tree: Any) -> TreeSession:
    """Candidates below the threshold are dropped unless ``below_threshold`` is given."""
    return TreeSession("sage", **{"below_threshold": "drop", **tree})


SURE = same_everywhere(1.0)  # a single candidate: confidence 1, and every level passes its threshold


# -------- worked examples


def test_defaults_are_those_of_the_paper() -> None:
    """Section 5.1: depth 3 to 8, width 2 to 10, k = 10, 64 nodes; a window of 10 accepted lengths, thresholds 2
    and 3.
    """
    policy = parse_policy({"policy": "sage"})
    assert policy.model_dump() == {
        "policy": "sage",
        "d_min": 3,
        "d_max": 8,
        "w_min": 2,
        "w_max": 10,
        "k": 10,
        "n_max": 64,
        "confidence": "previous",
        "depth_cap": None,
        "window": 10,
        "lower": 2.0,
        "upper": 3.0,
        "below_threshold": "leaf",
        "threshold": 0.1,
        "threshold_on": "path",
        "rounding": "nearest",
        "plan": "current",
    }


@pytest.mark.parametrize(
    ("probabilities", "confidence"),
    [
        # H = 4 (1/4) ln 4 = ln 4, so 1 - ln 4 / ln 4
        ([0.25, 0.25, 0.25, 0.25], 0.0),
        # H = 0
        ([1.0, 0.0, 0.0, 0.0], 1.0),
        # H = (1/2) ln 2 + (1/4) 2 ln 2 + 2 (1/8) 3 ln 2 = 1.75 ln 2; 1 - 1.75 ln 2 / (2 ln 2)
        ([0.5, 0.25, 0.125, 0.125], 0.125),
        # eq. 7 divides by the sum of the four, 0.8: the same distribution as above
        ([0.4, 0.2, 0.1, 0.1], 0.125),
        # two equal ones: H = ln 2, 1 - 1/2; candidates after the first k = 4 do not count
        ([0.3, 0.3, 0.0, 0.0, 0.0, 0.4], 0.5),
    ],
)
def test_confidence_by_hand(probabilities: list[float], confidence: float) -> None:
    """Equations 7 to 9 with k = 4, ln k = 2 ln 2."""
    children = np.zeros((1, len(probabilities)), CHILD)
    children["probability"] = probabilities
    with np.errstate(divide="ignore"):
        children["logprob"] = np.log(np.array(probabilities, np.float32))
    assert root_confidence(children, 0, 4) == pytest.approx(confidence, abs=1e-6)


def test_the_first_tree_by_hand() -> None:
    """The first round has confidence 1/2 (algorithm 1, line 3), whatever its root proposes.

    D = 3 + 0.5 * 5 = 5.5, to the nearest: 6. W = 2 + 0.5 * 8 = 6. Thresholds 0.1 l / 6: 1/60, 2/60, 3/60, 4/60, 5/60.

    Level 1, 6 candidates: 0.5, 0.25, 0.125, 0.0625, 0.02 exceed 0.01667; 0.01 does not.
    Level 2, W_2 = 6/2 (0.5 + P) = 3 (0.5 + P) children, above 0.03333, each node's own candidates being 0.6, 0.3, 0.1:
        P = 0.5     3.00 -> 3    0.3, 0.15, 0.05
        P = 0.25    2.25 -> 2    0.15, 0.075
        P = 0.125   1.88 -> 2    0.075, 0.0375
        P = 0.0625  1.69 -> 2    0.0375; 0.01875 falls
        P = 0.02    1.56 -> 2    0.012 and 0.006 fall
    Level 3, W_3 = 2 (0.5 + P), above 0.05:
        P = 0.3     1.60 -> 2    0.18, 0.09
        P = 0.15    1.30 -> 1    0.09, twice
        P = 0.05    1.10 -> 1    0.03 falls; so do 0.045 below 0.075 and 0.0225 below 0.0375
    Level 4, W_4 = 1.5 (0.5 + P), above 0.06667:
        P = 0.18    1.02 -> 1    0.108
        P = 0.09    0.89 -> 1    0.054 falls
    Level 5, above 0.08333: 0.0648 falls. The tree ends one level short of D.
    """
    draft = root_and_below([0.5, 0.25, 0.125, 0.0625, 0.02, 0.01, 0.01, 0.01, 0.005, 0.005], [0.6, 0.3, 0.1])
    level_1 = {(0,), (1,), (2,), (3,), (4,)}
    level_2 = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)}
    level_3 = {(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)}
    level_4 = {(0, 0, 0, 0)}
    assert set(sage().grow(draft)) == level_1 | level_2 | level_3 | level_4


# -------- history


def depth_limit(session: TreeSession) -> int:
    """The depth of a tree of confidence 1, which is the limit: D = D_min + 1 (limit - D_min)."""
    return max(len(path) for path in session.grow(SURE))


def test_reset_clears_confidence_and_history() -> None:
    session, draft = sage(), same_everywhere(0.6, 0.3, 0.1)
    fresh = session.grow(draft)
    session.grow(SURE)
    session.update(*[0] * 20)
    assert session.grow(draft) != fresh
    session.grower.reset()
    assert session.grow(draft) == fresh
    session = sage(confidence="current")
    session.update(*[0] * 9)
    session.grower.reset()
    session.update(*[0] * 9)
    assert depth_limit(session) == 8, "the window must fill again"


# -------- budget


def test_equally_probable_nodes_go_by_parent_then_rank() -> None:
    assert sage(n_max=3, w_min=4, w_max=4).grow(same_everywhere(0.25, 0.25, 0.25, 0.25)) == [(0,), (1,), (2,)]
    halves = root_and_below([0.5, 0.5], [0.5, 0.5])
    assert sage(n_max=5, w_min=2, w_max=2).grow(halves) == [(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]


def test_a_full_tree_asks_for_no_more_proposals() -> None:
    """Only the root is expanded: proposals for a full tree could not be used."""
    session = sage(n_max=4)
    session.grow(same_everywhere(0.4, 0.3, 0.2, 0.1))
    assert session.expanded == [[()]]


# -------- validation


def test_a_value_out_of_range_is_refused() -> None:
    assert_refused(
        "sage",
        ({"d_min": 9}, "d_min must be at most d_max, which is 8"),
        ({"w_min": 11}, "w_min must be at most w_max, which is 10"),
        ({"lower": 3.5}, "lower must be at most upper, which is 3.0"),
        ({"depth_cap": 2}, "d_min must be at most depth_cap, which is 2"),
        ({"d_max": 25}, "d_max: input should be less than or equal to 24; got 25"),
        ({"w_max": 17}, "w_max: input should be less than or equal to 16; got 17"),
        ({"k": 1}, "k: input should be greater than or equal to 2; got 1"),  # log k divides in eq. 9
        ({"k": 17}, "k: input should be less than or equal to 16; got 17"),
        ({"n_max": 129}, "n_max: input should be less than or equal to 128; got 129"),
        ({"window": 33}, "window: input should be less than or equal to 32; got 33"),
        ({"first_paths": [[0]]}, "first_paths"),
    )


def test_limits_follow_from_the_hyperparameters() -> None:
    policy = parse_policy({"policy": "sage", "n_max": 40, "depth_cap": 12, "k": 7})
    assert (policy.max_nodes, policy.max_depth, policy.num_proposals) == (40, 12, 7)
    assert parse_policy({"policy": "sage", "depth_cap": 5}).max_depth == 8
