"""WETAP against examples worked by hand; ``test_papers.py`` compares it with the paper on random drafts."""

from __future__ import annotations

from typing import Any

from autotune.trees.policy import parse_policy
from tests.trees.drafts import TreeSession, assert_refused


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
