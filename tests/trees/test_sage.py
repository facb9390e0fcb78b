"""SAGE against examples worked by hand from the paper's equations, and against a plain implementation of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autotune.trees.policy import parse_policy
from autotune.trees.sage import root_confidence
from autotune.trees.tree import CHILD
from tests.trees.drafts import Ranks, TreeSession, assert_refused, root_and_below, same_everywhere


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


def test_the_tree_after_a_confident_round_by_hand() -> None:
    """Confidence 1 from the round before: D = 3 + 1 * 5 = 8, W = 2 + 0 * 8 = 2. Thresholds 0.0125 l.

    Candidates 0.96, 0.03, 0.01 everywhere.
    Level 1: 0.96 and 0.03 exceed 0.0125.
    Level 2, W_2 = 0.5 + P: 1.46 -> 1 and 0.53 -> 1; 0.9216 and 0.0288 exceed 0.025.
    Level 3, W_3 = 2/3 (0.5 + P): 0.95 -> 1, and 0.35 -> 0, which becomes 1; 0.8847 exceeds 0.0375, 0.0276 does not.
    Levels 4 to 8: W_l = 2/l (0.5 + P) is 0.69, 0.54, 0.44, 0.37, 0.31, so 1 (the last three by "at least 1"); 0.96^8 =
    0.72 exceeds 0.1.
    """
    session = sage()
    session.grow(SURE)
    tree = session.grow(same_everywhere(0.96, 0.03, 0.01))
    assert set(tree) == {(0,), (1,), (0, 0), (1, 0)} | {(0,) * length for length in range(3, 9)}


def test_the_tree_after_an_uncertain_round_by_hand() -> None:
    """Ten equal candidates: confidence 0, D = 3, W = 2 + 1 * 8 = 10, thresholds l / 30, for the round after.

    Level 1: ten candidates of 0.1 exceed 0.0333. Level 2, W_2 = 5 (0.5 + 0.1) = 3: 0.07, 0.02, 0.01 of which 0.07
    exceeds 0.0667. Level 3 needs more than 0.1: 0.049 falls.
    """
    session = sage()
    session.grow(same_everywhere(*[0.1] * 10))
    tree = session.grow(root_and_below([0.1] * 10, [0.7, 0.2, 0.1]))
    assert set(tree) == {(rank,) for rank in range(10)} | {(rank, 0) for rank in range(10)}


def test_the_confidence_is_that_of_the_previous_or_of_the_current_round() -> None:
    """k = 4 and a root of confidence 1/8 (worked above), W between 1 and 3.

    With its own confidence: W = 1 + 7/8 * 2 = 2.75, rounded 3, and D = 3 + 1/8 * 5 = 3.6, rounded 4. With the first
    round's, 1/2: W = 2 and D = 5.5, rounded 6.
    """
    draft = root_and_below([0.5, 0.25, 0.125, 0.125], [1.0])

    def shape(session: TreeSession) -> tuple[int, int]:
        tree = session.grow(draft)
        return sum(len(path) == 1 for path in tree), max(len(path) for path in tree)

    previous, current = sage(k=4, w_min=1, w_max=3), sage(k=4, w_min=1, w_max=3, confidence="current")
    assert [shape(previous), shape(previous)] == [(2, 6), (3, 4)]
    assert [shape(current), shape(current)] == [(3, 4), (3, 4)]


def test_candidates_below_the_threshold_are_leaves() -> None:
    """An unsure draft, ten candidates of 0.03 after the root: confidence 0, so D = 3, W = 10, theta_1 = 0.1/3. All ten
    are verified and none is expanded; the reading ``drop`` gives an empty tree. 0.05 exceeds the threshold.
    """
    unsure = same_everywhere(*[0.03] * 10)
    leaves, dropped = sage(below_threshold="leaf", confidence="current"), sage(confidence="current")
    assert leaves.grow(unsure) == [(rank,) for rank in range(10)] and leaves.expanded == [[()]]
    assert dropped.grow(unsure) == []
    leaves.grow(same_everywhere(0.05, *[0.03] * 9))
    assert leaves.expanded == [[()], [(0,)]]


def test_the_threshold_on_the_last_token_alone() -> None:
    """D = 3, W = 1, thresholds 0.0333, 0.0667, 0.1: a chain of 0.2 has cumulative probabilities 0.2, 0.04, 0.008."""
    narrow = {"d_min": 3, "d_max": 3, "w_min": 1, "w_max": 1}
    chain = same_everywhere(0.2)
    assert sage(**narrow).grow(chain) == [(0,)]
    assert sage(**narrow, threshold_on="token").grow(chain) == [(0,), (0, 0), (0, 0, 0)]
    assert sage(**narrow, threshold=0.05).grow(chain) == [(0,), (0, 0)]  # 0.0333 at level 2, 0.05 at level 3
    assert sage(**narrow, threshold=0.0).grow(chain) == [(0,), (0, 0), (0, 0, 0)]
    leaves = sage(**narrow, below_threshold="leaf", threshold_on="path")
    assert leaves.grow(chain) == [(0,), (0, 0)], "0.04 is a leaf"


@pytest.mark.parametrize(("rounding", "depth", "width"), [("nearest", 6, 5), ("floor", 5, 4), ("ceil", 6, 5)])
def test_rounding_of_depth_and_width(rounding: str, depth: int, width: int) -> None:
    """The first round: D = 3 + 0.5 * 5 = 5.5, W = 2 + 0.5 * 5 = 4.5."""
    session = sage(w_max=7, rounding=rounding, threshold=0.0)
    tree = session.grow(root_and_below([0.2] * 5, [1.0]))
    assert max(map(len, tree)) == depth and sum(len(path) == 1 for path in tree) == width


def test_a_planned_tree_has_the_shape_of_the_last_root() -> None:
    """After a root of 0.5, 0.25, 0.25 and k = 4: confidence 1/4, D = 3 + 0.25 * 5 = 4.25, rounded 4, W = 2 + 0.75 * 8 =
    8. Candidates below the threshold, 0.025 l, are dropped. What the draft proposes in the planned round does not
    matter.

    Level 1: 0.5, 0.25, 0.25; the fourth has probability 0. Level 2, W_2 = 4 (0.5 + P): 4 for 0.5 and 3 for 0.25, so
    0.25, 0.125, 0.125; 0.125, 0.0625, 0.0625; the same. All exceed 0.05. Level 3, W_3 = 8/3 (0.5 + P) is 2 for 0.25:
    0.125; 0.0625 falls below 0.075, as it does below 0.125 and 0.0625. Level 4: 0.0625 falls below 0.1.
    """
    session = sage(k=4, plan="previous")
    session.grow(root_and_below([0.5, 0.25, 0.25], [1.0]))
    tree = session.grow(same_everywhere(0.9, 0.05, 0.03, 0.02))
    assert set(tree) == {(0,), (1,), (2,), *((rank, child) for rank in range(3) for child in range(3)), (0, 0, 0)}
    assert session.expanded == [[()], [(0,), (1,), (2,)], [(0, 0)]], "the draft reads parents only"


# -------- history


def depth_limit(session: TreeSession) -> int:
    """The depth of a tree of confidence 1, which is the limit: D = D_min + 1 (limit - D_min)."""
    return max(len(path) for path in session.grow(SURE))


def test_rejected_drafts_lower_the_limit_once_the_window_is_full_down_to_d_min() -> None:
    session = sage(confidence="current")
    session.update(*[0] * 9)
    assert depth_limit(session) == 8
    limits = []
    for _ in range(7):
        session.update(0)
        limits.append(depth_limit(session))
    assert limits == [7, 6, 5, 4, 3, 3, 3]


def test_accepted_drafts_raise_the_limit_up_to_the_cap() -> None:
    session = sage(confidence="current", depth_cap=10)
    session.update(*[8] * 9)
    limits = []
    for _ in range(4):
        session.update(8)
        limits.append(depth_limit(session))
    assert limits == [9, 10, 10, 10]


def test_without_a_cap_history_raises_no_further_than_d_max() -> None:
    session = sage(confidence="current")
    session.update(*[8] * 15)
    assert depth_limit(session) == 8
    session.update(*[0] * 9)  # one of the ten is still 8: a mean of 0.8
    assert depth_limit(session) < 8
    session.update(*[8] * 30)
    assert depth_limit(session) == 8


def test_a_mean_on_either_threshold_changes_nothing() -> None:
    """Hysteresis: the limit moves only below 2 and above 3."""
    for length in (2, 3):
        session = sage(confidence="current", depth_cap=12)
        session.update(*[length] * 30)
        assert depth_limit(session) == 8


def test_the_window_slides() -> None:
    """A window of 2: means of (0, 0), (0, 1), (1, 8), (8, 8) against 2 and 3 move 8 by -1, -1, +1, +1."""
    session, limits = sage(confidence="current", window=2, depth_cap=9), []
    for length in (0, 0, 1, 8, 8, 8):
        session.update(length)
        limits.append(depth_limit(session))
    assert limits == [8, 7, 6, 7, 8, 9]


def test_history_moves_d_max_of_equation_10() -> None:
    """A limit of 5 and confidence 1/2 (of a root with two equal candidates of four): D = 3 + 0.5 * 2 = 4."""
    session = sage(confidence="current", k=4, window=1)
    session.update(0, 0, 0)
    assert max(len(path) for path in session.grow(root_and_below([0.5, 0.5], [1.0]))) == 4


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


def test_the_budget_compares_cumulative_probabilities_across_parents() -> None:
    """W = 2, so level 1 is 0.5, 0.4. Level 2 has room for two of 0.5 * 0.6 = 0.3, 0.5 * 0.4 = 0.2, 0.4 * 0.9 = 0.36."""
    table: dict[Ranks, list[float]] = {(): [0.5, 0.4, 0.1], (0,): [0.6, 0.4], (1,): [0.9, 0.1]}
    assert sage(n_max=4, w_min=2, w_max=2).grow(lambda path: table[path]) == [(0,), (1,), (1, 0), (0, 0)]


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
