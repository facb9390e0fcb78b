"""WETAP against examples worked by hand; ``test_papers.py`` compares it with the paper on random drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autotune.trees.policy import parse_policy
from autotune.trees.tree import ROOT, Tree, new_tree, set_root
from autotune.trees.wetap import next_width
from tests.obvious import add_node
from tests.trees.drafts import Ranks, TreeSession, assert_refused, by_table, root_and_below, same_everywhere


def wetap(**hyperparameters: Any) -> TreeSession:
    return TreeSession("wetap", **hyperparameters)


def width_after(*probabilities: float, **hyperparameters: Any) -> int:
    """Width of the level below nodes of these cumulative probabilities, most probable first."""
    policy = parse_policy({"policy": "wetap", **hyperparameters})
    return int(next_width(policy.encode(), level_of(np.array(probabilities)), 3))


def level_of(probabilities: np.ndarray) -> Tree:
    """A tree whose last level, from node 3 on, has these cumulative probabilities."""
    tree = new_tree(2 + len(probabilities))
    set_root(tree, 0, -1)
    for logprob in (-0.1, -0.2, *np.log(probabilities)):
        add_node(tree, ROOT, 0, float(logprob), 0, -1)
    return tree


# -------- widths by hand


def test_defaults_are_those_of_the_paper() -> None:
    """Appendix B.4: 64 tokens, length 8, top-k 10, top-p 0.9; W in [16, 128], exponent 1.2, weight 0.6 (section
    4.4).
    """
    policy = parse_policy({"policy": "wetap"})
    assert policy.model_dump() == {
        **{"policy": "wetap", "length": 8, "w_min": 16, "w_max": 128, "gamma": 1.2, "alpha": 0.6},
        **{"budget": 64, "top_k": 10, "top_p": 0.9, "nucleus": "top_k", "entropy_of": "path"},
    }
    assert (policy.max_nodes, policy.max_grown, policy.max_width) == (64, 10 + 7 * 128, 128)
    assert (policy.max_depth, policy.num_proposals) == (8, 10)


def test_equal_nodes_have_the_widest_next_level_and_a_single_one_the_narrowest() -> None:
    """H_norm is 1 and 0 (below eq. 6); a single node has log W_t = 0, which must not be divided by."""
    assert width_after(0.25, 0.25, 0.25, 0.25) == 128
    assert width_after(0.01, 0.01) == 128
    assert width_after(0.7) == 16
    assert width_after(1.0, 1e-30) == 16


@pytest.mark.parametrize(
    ("gamma", "width"),
    [
        (1.0, 114),  # 16 + 112 * 0.875 = 114
        (2.0, 102),  # 16 + 112 * 0.765625 = 101.75
        (0.5, 121),  # 16 + 112 * 0.935414 = 120.77
        (1.2, 111),  # 16 + 112 * exp(1.2 ln 0.875) = 16 + 112 * 0.851945 = 111.42
    ],
)
def test_width_by_hand(gamma: float, width: int) -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: H = (1/2) ln 2 + (1/4) 2 ln 2 + 2 (1/8) 3 ln 2 = 1.75 ln 2 (eq. 4), by ln 4
    0.875 (eq. 6).
    """
    assert width_after(0.5, 0.25, 0.125, 0.125, gamma=gamma) == width


def test_probabilities_are_normalised_before_their_entropy_is_taken() -> None:
    """Eq. 3: the width does not depend on the depth of the level."""
    assert width_after(0.05, 0.025, 0.0125, 0.0125, gamma=1.0) == 114
    assert width_after(5e-200, 2.5e-200, 1.25e-200, 1.25e-200, gamma=1.0) == 114


def test_the_entropy_may_be_of_the_tokens_own_probabilities() -> None:
    """Tokens of 1/2 below nodes of 1/2 and 1/8 are equal by their own probability. By the cumulative ones, 1/4 and
    1/16, they are 4/5 and 1/5: H = (4/5) ln(5/4) + (1/5) ln 5 = 0.500402, by ln 2 0.721928; 16 + 112 * 0.721928 =
    96.86.
    """
    tree = new_tree(4)
    set_root(tree, 0, -1)
    for path_probability, parent in ((1 / 2, ROOT), (1 / 8, ROOT), (1 / 4, 1), (1 / 16, 2)):
        add_node(tree, parent, 0, float(np.log(path_probability)), 0, -1)
    for entropy_of, width in (("path", 97), ("token", 128)):
        policy = parse_policy({"policy": "wetap", "gamma": 1.0, "entropy_of": entropy_of})
        assert next_width(policy.encode(), tree, 3) == width


def test_the_entropy_of_a_level_sets_the_width_of_the_next() -> None:
    """W in [2, 6], exponent 1; each node offers 0.5, 0.25, 0.125, 0.125.

    Level 1 has W_min = 2 nodes: 0.5, 0.25. Normalised 2/3, 1/3: H = 0.636514, by ln 2 0.918296; W_2 = 2 + 4 * 0.918296
    = 5.67, to the nearest: 6. Level 2, of 0.25, 0.125, 0.0625, 0.0625 and 0.125, 0.0625, 0.03125, 0.03125: the six
    best, 4 of the first node and two of the second. Sixteenths: 4, 2, 2, 1, 1, 1 of 11. H = ln 11 - (4 ln 4 + 4 ln 2) /
    11 = 2.397895 - 0.756160 = 1.641735, by ln 6 0.916273; W_3 = 5.67, to the nearest: 6.
    """
    session = wetap(length=3, w_min=2, w_max=6, gamma=1.0, budget=128)
    draft = same_everywhere(0.5, 0.25, 0.125, 0.125)
    tree = session.grow(draft)
    assert tree[:2] == [(0,), (1,)]
    # 1/4, then 1/8 twice, then 1/16 three times: equal ones by parent, then by rank.
    assert tree[2:8] == [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)]
    # 1/8, then 1/16 of (0,0), (0,1), (1,0), then three of the 1/32.
    assert tree[8:] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 2), (0, 0, 3)]
    assert session.expanded == [[()], tree[:2], tree[2:8]]


# -------- candidates


def test_candidates_of_a_parent_end_where_their_probabilities_sum_to_top_p() -> None:
    """0.5 + 0.3 is below 0.9, so 0.15 is taken too; of 0.95 and 0.05 the first suffices."""
    wide = {"w_min": 10, "w_max": 10, "length": 1}
    assert wetap(**wide).grow(same_everywhere(0.5, 0.3, 0.15, 0.05)) == [(0,), (1,), (2,)]
    assert wetap(**wide).grow(same_everywhere(0.95, 0.05)) == [(0,)]
    assert wetap(**wide, top_p=0.01).grow(same_everywhere(0.5, 0.3, 0.15, 0.05)) == [(0,)], "at least one"
    assert wetap(**wide, top_p=0.96).grow(same_everywhere(0.5, 0.3, 0.15, 0.05)) == [(0,), (1,), (2,), (3,)]


def test_top_p_is_a_share_of_the_top_k() -> None:
    """The three best of 0.4, 0.3, 0.2, 0.1 have 0.9 in all. Two of them are 7/9 of that, below 0.8, and more than 0.7;
    of all tokens they are 0.7.
    """
    draft, wide = same_everywhere(0.4, 0.3, 0.2, 0.1), {"w_min": 10, "w_max": 10, "length": 1, "top_k": 3}
    assert wetap(**wide, top_p=0.8).grow(draft) == [(0,), (1,), (2,)]
    assert wetap(**wide, top_p=0.75).grow(draft) == [(0,), (1,)]
    assert wetap(**wide, top_p=0.75, nucleus="all").grow(draft) == [(0,), (1,), (2,)]
    assert wetap(**wide, top_p=1.0).grow(draft) == [(0,), (1,), (2,)]


def test_top_p_is_compared_with_conditional_probabilities() -> None:
    """Cumulative ones never reach 0.9 below a node of 0.5."""
    session = wetap(w_min=10, w_max=10, length=2)
    assert session.grow(root_and_below([0.5, 0.5], [0.95, 0.05])) == [(0,), (1,), (0, 0), (1, 0)]


def test_candidates_of_no_probability_are_none() -> None:
    assert wetap(length=4).grow(same_everywhere()) == []
    session = wetap(length=4, w_min=4, w_max=4)
    assert session.grow(by_table({(): [0.4], (0,): [0.5, 0.3]})) == [(0,), (0, 0), (0, 1)]
    assert session.expanded == [[()], [(0,)], [(0, 0), (0, 1)]]


# -------- pruning


@pytest.mark.parametrize(
    ("alpha", "budget", "tree"),
    [
        (0.5, 2, [(0,), (0, 0)]),
        # (0), (0,0) and (1,0) score best; (1) is added back; no leaf is above the last level; (1,0) is least probable.
        (0.5, 3, [(0,), (1,), (0, 0)]),
        (0.5, 1, [(0,)]),
        (0.75, 2, [(0,), (1,)]),
        (1.0, 3, [(0,), (1,), (0, 0)]),
        # (0,0) and (1,0) score best; (0) and (1) are added back, which makes 4; (1,0) and (0,0) are least probable.
        (0.0, 2, [(0,), (1,)]),
    ],
)
def test_scores_by_hand(alpha: float, budget: int, tree: list[Ranks]) -> None:
    """Nodes 0.6, 0.4 and below them 0.6 * 0.5 = 0.3, 0.4 * 0.6 = 0.24. Of eq. 7 p_min = 0.24, p_max - p_min = 0.36; the
    length is 2.

                   p_norm     l      alpha 0.5   0.75     1
            (0)    1          0.5    0.75        0.875    1
            (1)    0.4444     0.5    0.4722      0.4583   0.4444
            (0,0)  0.1667     1      0.5833      0.375    0.1667
            (1,0)  0          1      0.5         0.25     0
    """
    draft = by_table({(): [0.6, 0.4], (0,): [0.5, 0.3], (1,): [0.6, 0.2]})
    session = wetap(length=2, w_min=2, w_max=2, alpha=alpha, budget=budget, top_p=1.0)
    assert session.grow(draft) == tree
    assert session.grown == [(0,), (1,), (0, 0), (1, 0)]


APPENDIX_D: dict[Ranks, list[float]] = {
    (): [0.8, 0.15, 0.05],
    (0,): [0.9, 0.05],
    (1,): [0.4, 0.2],
    (2,): [0.5],
    (0, 0): [0.9],
    (0, 1): [0.5],
    (1, 0): [0.5],
    (2, 0): [0.4],
    (0, 0, 0): [0.9, 0.05],
    (0, 1, 0): [0.8],
    (1, 0, 0): [0.6],
    (2, 0, 0): [0.5],
}
LEVELS: list[list[Ranks]] = [
    [(0,), (1,), (2,)],
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)],
    [(0, 0, 0), (1, 0, 0), (0, 1, 0), (2, 0, 0)],
    [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0)],
]


@pytest.mark.parametrize(
    ("budget", "dropped"),
    [
        (16, []),
        (15, [(1, 1)]),
        (14, [(1, 1), (2, 0, 0)]),
        (13, [(1, 1), (2, 0, 0), (0, 1, 0, 0)]),
        (12, [(1, 1), (2, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0)]),
    ],
)
def test_a_tree_of_the_size_of_appendix_d(budget: int, dropped: list[Ranks]) -> None:
    """Length 4, W in [3, 6], levels of 3, 5, 4, 4 nodes as in the appendix, whose figure has no numbers; exponent 1.

    Level 1: 0.8, 0.15, 0.05.                                H_norm 0.5579, W_2 = 3 + 3 * 0.5579 = 4.67
    Level 2: 0.72, 0.06, 0.04, 0.03, 0.025.                  H_norm 0.4365, W_3 = 4.31
    Level 3: 0.648, 0.03, 0.02, 0.01; (1,1) has no child.    H_norm 0.2712, W_4 = 3.81
    Level 4: 0.5832, 0.0324, 0.018, 0.016; 0.005 is the fifth, and so (2,0,0) stays a leaf.

    With alpha = 0.1 depth decides: level 4 scores 0.9 and more, level 3 0.675, level 2 0.45, level 1 0.225. Budget 12
    takes levels 4, 3 and four nodes of level 2; the missing parents are (0), (1), (2) and (2,0), the least probable of
    level 2: 16 nodes again. Leaves from shallow to deep: none in level 1, (1,1) in level 2, (2,0,0) in level 3; (2,0)
    is now a leaf too, but its level has passed. Two nodes are still too many: the least probable are 0.016 and 0.018,
    in level 4. Larger budgets stop earlier.
    """
    session = wetap(length=4, w_min=3, w_max=6, gamma=1.0, alpha=0.1, budget=budget, top_p=1.0)
    tree = session.grow(by_table(APPENDIX_D))
    assert session.grown == [path for level in LEVELS for path in level]
    assert tree == [path for path in session.grown if path not in dropped]


def test_the_least_probable_leaf_of_a_level_is_dropped_first() -> None:
    """Level 1 is 0.5, 0.3, 0.2. With a child of the first, depth alone scores (0,0) best, then (0), (1), (2) equally:
    the earlier are kept. With a child of the third, (2) is added back, and of the leaves (0) and (1) the latter, less
    probable one is dropped.
    """
    shape = {"length": 2, "w_min": 3, "w_max": 3, "alpha": 0.0}
    first, third = by_table({(): [0.5, 0.3, 0.2], (0,): [0.9]}), by_table({(): [0.5, 0.3, 0.2], (2,): [0.9]})
    assert wetap(**shape, budget=3).grow(first) == [(0,), (1,), (0, 0)]
    assert wetap(**shape, budget=2).grow(first) == [(0,), (0, 0)]
    assert wetap(**shape, budget=3).grow(third) == [(0,), (2,), (2, 0)]


# -------- validation


def test_a_value_out_of_range_is_refused() -> None:
    assert_refused(
        "wetap",
        ({"w_min": 20, "w_max": 10}, "w_min must be at most w_max, which is 10"),
        ({"length": 25}, "length: input should be less than or equal to 24; got 25"),
        ({"w_max": 257}, "w_max: input should be less than or equal to 256; got 257"),
        ({"budget": 129}, "budget: input should be less than or equal to 128; got 129"),
        ({"top_k": 17}, "top_k: input should be less than or equal to 16; got 17"),
        ({"topk": 8}, "unknown key 'topk'; did you mean 'top_k'?"),
    )
