"""``chain``: the best child of the last node, to a fixed depth."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.errors import UserError
from autotune.trees import policy as policies
from autotune.trees.policy import parse_policy
from autotune.trees.tree import MAX_NODES, Tree, new_tree, plant


def grow_chain(depth: int) -> tuple[Tree, list[int]]:
    """A chain whose draft proposes 100 + the token before it, with log-probability -0.5; and the nodes that were asked
    for proposals.
    """
    policy = parse_policy({"policy": "chain", "depth": depth})
    params, state, tree, frontier, asked = (
        policy.encode(),
        policies.new_state(),
        new_tree(),
        np.zeros(MAX_NODES, np.int64),
        [],
    )
    policies.reset(policy.KIND, params, state)
    plant(tree, 7, -1)
    count = 1
    while count:
        assert count == 1
        node = int(frontier[0])
        asked.append(node)
        tokens, logprobs = np.array([[tree.token[node] + 100]]), np.array([[-0.5]], np.float32)
        count = policies.grow(
            policy.KIND, params, state, tree, frontier, 1, tokens, logprobs, np.array([[asked[-1] + 40]])
        )
    policies.learn(policy.KIND, params, state, depth)
    return tree, asked


@pytest.mark.parametrize("depth", [1, 2, 5, 24])
def test_a_chain_has_one_node_per_level(depth: int) -> None:
    tree, asked = grow_chain(depth)
    nodes = np.arange(depth + 1)
    assert tree.size[0] == depth + 1
    assert tree.token[: depth + 1].tolist() == (7 + 100 * nodes).tolist()
    assert tree.parent[: depth + 1].tolist() == (nodes - 1).tolist()
    assert tree.depth[: depth + 1].tolist() == nodes.tolist()
    assert tree.path_logprob[: depth + 1] == pytest.approx(-0.5 * nodes)
    assert tree.source[1 : depth + 1].tolist() == (nodes[:-1] + 40).tolist()
    assert asked == list(range(depth)), "the last node's proposals are of no use"


def test_the_default_is_what_serving_engines_run() -> None:
    """vLLM and SGLang: five tokens."""
    policy = parse_policy({"policy": "chain"})
    assert (policy.depth, policy.max_nodes, policy.max_depth, policy.num_proposals) == (5, 5, 5, 1)


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        (0, "depth: input should be greater than or equal to 1; got 0"),
        (25, "depth: input should be less than or equal to 24; got 25"),
        ("deep", "depth: input should be a valid integer; got 'deep'"),
    ],
)
def test_a_depth_out_of_range_is_refused(depth: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_policy({"policy": "chain", "depth": depth})
