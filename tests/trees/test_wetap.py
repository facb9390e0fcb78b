"""WETAP against examples worked by hand; ``test_papers.py`` compares it with the paper on random drafts."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.trees.policy import parse_policy
from tests.trees.drafts import Ranks, TreeSession, assert_refused, by_table, same_everywhere


def wetap(**hyperparameters: Any) -> TreeSession:
    return TreeSession("wetap", **hyperparameters)


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


# -------- candidates


def test_candidates_of_no_probability_are_none() -> None:
    assert wetap(length=4).grow(same_everywhere()) == []
    session = wetap(length=4, w_min=4, w_max=4)
    assert session.grow(by_table({(): [0.4], (0,): [0.5, 0.3]})) == [(0,), (0, 0), (0, 1)]
    assert session.expanded == [[()], [(0,)], [(0, 0), (0, 1)]]


# -------- pruning


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
