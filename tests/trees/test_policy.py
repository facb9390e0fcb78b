"""Policies by name: what a profile or a search space may say, and the error for each thing it may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autotune.errors import UserError
from autotune.trees import policy as policies
from autotune.trees.policy import POLICIES, parse_policy
from autotune.trees.tree import MAX_LEVELS, MAX_NODES, new_tree, plant

LARGEST: dict[str, dict[str, Any]] = {
    "chain": {"depth": 24},
    "sage": {"d_min": 24, "d_max": 24, "depth_cap": 24, "w_min": 16, "w_max": 16, "k": 16, "n_max": 128, "window": 32},
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_name_alone_takes_the_defaults_and_round_trips(name: str) -> None:
    policy = parse_policy({"policy": name})
    assert type(policy) is POLICIES[name]
    assert parse_policy(policy.model_dump()) == policy
    assert parse_policy(policy) is policy


@pytest.mark.parametrize("name", POLICIES)
def test_the_largest_tree_fits_the_arrays(name: str) -> None:
    """The compiled steps check no bounds. A draft that puts equal hope in every candidate, and enough of it, grows as
    much as the policy allows.
    """
    policy = parse_policy({"policy": name, **LARGEST[name]})
    assert policy.max_nodes < MAX_NODES and policy.max_depth <= MAX_LEVELS
    params, state, tree, frontier, count = (
        policy.encode(),
        policies.new_state(),
        new_tree(),
        np.zeros(MAX_NODES, np.int64),
        1,
    )
    policies.reset(policy.KIND, params, state)
    plant(tree, 0, -1)
    while count:
        shape = (count, policy.num_proposals)
        count = policies.grow(
            policy.KIND,
            params,
            state,
            tree,
            frontier,
            count,
            np.zeros(shape, np.int64),
            np.full(shape, -0.001, np.float32),
            np.full(shape, -1),
        )
    for _ in range(100):
        policies.learn(policy.KIND, params, state, 24)
    assert tree.size[0] == policy.max_nodes + 1
    assert tree.depth[: tree.size[0]].max() <= policy.max_depth


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_frozen(name: str) -> None:
    """Replay and the runtime may share it."""
    policy = parse_policy({"policy": name})
    with pytest.raises(ValueError, match="frozen"):
        policy.policy = "other"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"policy": "sagee"}, "tree: unknown tree policy 'sagee'; did you mean 'sage'?"),
        ({"policy": "bush"}, "tree: unknown tree policy 'bush'; known: chain, sage"),
        ({"depth": 5}, "tree: unknown tree policy None; known: chain, sage"),
        ("chain", "tree: unknown tree policy None; known: chain, sage"),
        ({"policy": "sage", "dmax": 8}, "tree: unknown key 'dmax'; did you mean 'd_max'?"),
        ({"policy": "chain", "dept": 8}, "tree: unknown key 'dept'; did you mean 'depth'?"),
        ({"policy": "chain", "w_max": 8}, "tree: unknown key 'w_max'; known: depth, policy"),
        (
            {"policy": "chain", "depth": 99},
            "tree: depth: input should be less than or equal to 24; got 99; mend that value",
        ),
    ],
)
def test_a_mistake_names_what_it_is_and_the_nearest_right_word(tree: Any, message: str) -> None:
    # The list of known words may grow with new policies: it is compared up to the first one.
    with pytest.raises(UserError) as caught:
        parse_policy(tree)
    assert str(caught.value).startswith(message.split(" known:")[0])


def test_the_source_of_a_mistake_is_named() -> None:
    with pytest.raises(UserError, match=r"^profile\.json: points\.0\.tree: unknown tree policy 'x'"):
        parse_policy({"policy": "x"}, source="profile.json: points.0.tree")


@pytest.mark.parametrize("name", [["sage"], {"policy": "sage"}])
def test_a_name_that_is_no_text(name: Any) -> None:
    """As a profile written by hand may have it."""
    with pytest.raises(UserError, match="unknown tree policy"):
        parse_policy({"policy": name})
