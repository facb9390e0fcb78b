"""``chain``: the best child of the last node, to a fixed depth."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.trees.policy import TreeGrower, parse_policy
from autotune.trees.tree import Tree
from tests.trees.drafts import TreeSession, assert_refused, by_table, same_everywhere


def grow_chain(depth: int) -> tuple[Tree, list[int]]:
    """A chain whose draft proposes 100 + the token before, with log-probability -0.5; and the nodes expanded."""
    grower, expanded = TreeGrower(parse_policy({"policy": "chain", "depth": depth})), []
    grower.reset()
    grower.plant(7)
    while len(grower.frontier):
        (node,) = grower.frontier.tolist()
        expanded.append(node)
        tokens = np.array([[grower.tree.token[node] + 100]], np.int32)
        grower.grow(tokens, np.array([[-0.5]], np.float32))
    grower.prune()
    grower.update(depth)
    return grower.tree, expanded


def test_a_chain_has_one_node_per_level() -> None:
    for depth in (1, 2, 5, 24):
        tree, expanded = grow_chain(depth)
        nodes = np.arange(depth + 1)
        assert tree.size[0] == depth + 1
        assert tree.token[: depth + 1].tolist() == (7 + 100 * nodes).tolist()
        assert tree.parent[: depth + 1].tolist() == (nodes - 1).tolist()
        assert tree.depth[: depth + 1].tolist() == nodes.tolist()
        assert tree.path_logprob[: depth + 1] == pytest.approx(-0.5 * nodes)
        assert tree.rank[1 : depth + 1].tolist() == [0] * depth
        assert expanded == list(range(depth)), "the last node is a leaf"


def test_only_the_most_probable_proposal_is_followed() -> None:
    assert TreeSession("chain", depth=3).grow(same_everywhere(0.4, 0.4, 0.2)) == [(0,), (0, 0), (0, 0, 0)]


def test_a_chain_ends_where_the_draft_proposes_nothing() -> None:
    """A proposal of probability 0 is none. prompt_lookup may propose nothing for the root."""
    assert TreeSession("chain", depth=3).grow(same_everywhere()) == []
    assert TreeSession("chain", depth=3).grow(by_table({(): [0.5], (0,): [0.5]})) == [(0,), (0, 0)]


def test_the_default_is_what_serving_engines_run() -> None:
    """vLLM and SGLang: five tokens."""
    policy = parse_policy({"policy": "chain"})
    assert (policy.depth, policy.max_nodes, policy.max_grown, policy.max_depth) == (5, 5, 5, 5)
    assert (policy.max_width, policy.num_proposals) == (1, 1)


def test_a_value_out_of_range_is_refused() -> None:
    assert_refused(
        "chain",
        ({"depth": 0}, "depth: input should be greater than or equal to 1; got 0"),
        ({"depth": 25}, "depth: input should be less than or equal to 24; got 25"),
        ({"depth": "deep"}, "depth: input should be a valid integer; got 'deep'"),
    )
