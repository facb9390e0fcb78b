"""Policies by name, their limits, and the calls that drive any of them."""

from __future__ import annotations

import ast
import sys
from typing import Any

import numpy as np
import pytest

from autotune.errors import UserError
from autotune.replay.trace import pack_trace
from autotune.trees import policy as policies
from autotune.trees.policy import KINDS, POLICIES, STATE_SIZE, TreeGrower, kind_number, parse_policy
from autotune.trees.priced import GRID
from autotune.trees.static import NO_TOKEN
from autotune.trees.tree import MAX_LEVELS, MAX_STEP, ROOT, Tree, new_tree, new_workspace, set_root
from tests.imports import MODULES
from tests.sample_documents import random_trace
from tests.trees.drafts import Draft, Ranks, TreeSession, assert_is_tree, path_logprob, same_everywhere

LARGEST: dict[str, dict[str, Any]] = {
    "chain": {"depth": 24},
    "sage": {"d_min": 24, "d_max": 24, "depth_cap": 24, "w_min": 16, "w_max": 16, "k": 16, "n_max": 128, "window": 32},
    "eagle2": {"depth": 24, "k": 16, "budget": 128},
    "wetap": {"length": 24, "w_min": 256, "w_max": 256, "budget": 128, "top_k": 16, "top_p": 1.0},
    "priced": {
        **{"worth": 1e6, "depth": 24, "width": 16, "k": 15, "budget": 128},
        "prices": {"level": [[0.0, 0.0]], "verify": [[1.0, 1.0]]},
    },
    "static": {"paths": [[rank, *[0] * level] for rank in range(16) for level in range(8)]},
}
PRUNES = ("eagle2", "wetap", "priced")  # draft more than they verify


def test_a_name_alone_takes_the_defaults_and_round_trips() -> None:
    for name in POLICIES:
        policy = parse_policy({"policy": name})
        assert type(policy) is POLICIES[name]
        assert parse_policy(policy.model_dump()) == policy
        assert parse_policy(policy) is policy
        with pytest.raises(ValueError, match="frozen"):  # replay and the runtime may share it
            policy.policy = "other"  # type: ignore[assignment]


def test_a_policy_states_its_facts() -> None:
    """Its step ``grow``, the source of its defaults, and hyperparameters that it names."""
    assert list(POLICIES.values()) == list(KINDS)
    for number, kind in enumerate(KINDS):
        assert kind_number(kind()) == number and callable(vars(sys.modules[kind.__module__])["grow"])
        assert set(kind.as_chain or {}) <= set(kind.model_fields)
        assert kind.template_sizes or kind.largest(kind().hyperparameters) == kind().hyperparameters
        assert kind.source
        assert {name for pair in kind.ordered for name in pair} <= set(kind().hyperparameters)
        assert kind().forest_bounds.depth == kind().size.depth


def test_no_module_outside_trees_asks_for_a_policy_by_name() -> None:
    """Attributes of its class say what a policy is; a comparison with a name would leave out policies to come."""
    asked = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        if module.startswith("autotune.") and not module.startswith("autotune.trees.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.match_case)
        for part in ast.walk(node.pattern if isinstance(node, ast.match_case) else node)
        if getattr(part, "value", None) in POLICIES or getattr(part, "attr", None) == "KIND"
    ]
    assert not asked, "ask an attribute of the policy's class"


def test_a_label_has_what_differs_from_the_defaults() -> None:
    for tree, label in (
        ({"policy": "chain"}, "chain(depth=5)"),
        ({"policy": "sage"}, "sage()"),
        ({"policy": "sage", "d_max": 12, "lower": 1.5}, "sage(d_max=12, lower=1.50)"),
        ({"policy": "static", "paths": [[0], [1], [1, 0]]}, "static(nodes=3, depth=2)"),
    ):
        assert parse_policy(tree).label == label


def test_a_draft_that_proposes_nothing_leaves_the_root_after_one_level() -> None:
    """Such a round verifies what a plain step does. Trees of a shape that is known beforehand keep it."""
    for name in POLICIES:
        for options in (
            ({}, {"plan": "previous"}) if name == "sage" else ({"nucleus": "all"}, {}) if name == "wetap" else ({},)
        ):
            session = TreeSession(name, **options)
            session.update(1)
            assert session.policy.keeps_empty_nodes == (name == "static" or "plan" in options)
            paths = session.grow(same_everywhere())
            if session.policy.keeps_empty_nodes:
                assert paths and (session.tree.token[1 : int(session.tree.size[0])] == NO_TOKEN).all()
            else:
                assert paths == [] and session.expanded == [[()]], (name, options)


def drafts_of_many_shapes() -> dict[str, Draft]:
    """Drafts under which policies grow the largest trees."""

    def backwards(path: Ranks) -> list[float]:
        return [0.9] * 16 if all(rank == 15 for rank in path) else [0.89] * 16

    return {
        "equal": same_everywhere(*[0.999] * 16),
        "uniform": same_everywhere(*[1 / 16] * 16),
        "sure": same_everywhere(1.0),
        "certain of all": same_everywhere(*[1.0] * 16),
        "backwards": backwards,
        "none": same_everywhere(),
    }


@pytest.mark.parametrize("name", POLICIES)
def test_the_largest_tree_fits_the_arrays(name: str) -> None:
    """The compiled steps check no bounds, so a policy's limits must hold. A draft with equally and highly probable
    candidates grows as much as the policy allows.
    """
    session = TreeSession(name, **LARGEST[name])
    policy = session.policy
    assert policy.size.nodes < MAX_STEP and policy.max_step <= MAX_STEP and policy.size.depth < MAX_LEVELS
    for shape, draft in drafts_of_many_shapes().items():
        paths = session.grow(draft)
        assert len(session.grown) <= policy.size.grown, shape
        assert len(paths) <= policy.size.nodes, shape
        assert max(map(len, session.expanded)) <= policy.size.width, shape
        assert len(session.expanded) <= policy.size.depth, shape
        assert max(map(len, session.grown), default=0) <= policy.size.depth, shape
        assert_is_tree(session.tree)
        if shape == "equal":
            assert len(paths) == policy.size.nodes
        session.update(*[24] * 50)


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_written_beyond_the_largest_tree(name: str) -> None:
    """Entries beyond the policy's limits stay unchanged."""
    session = TreeSession(name, **LARGEST[name])
    policy, grower = session.policy, session.grower
    roomy = new_tree(policy.size.grown + 7), new_workspace(policy.size.grown + 7)
    tight = new_workspace(policy.size.grown)
    for arrays in roomy:
        for array in arrays:
            array[-7:] = 77
    grower.tree, grower._work = roomy
    for draft in drafts_of_many_shapes().values():
        session.grow(draft)
    assert all((array[policy.size.grown + 1 :] == 77).all() for array in roomy[0][:-1])
    assert all((array[len(tight.mark) :] == 77).all() for array in roomy[1])


def test_rank_token_and_probability_of_a_node_belong_together() -> None:
    """Before and after pruning. The draft has read no node yet."""
    for name in POLICIES:
        session = TreeSession(name)
        draft = same_everywhere(0.5, 0.2, 0.1, 0.1)
        for node, path in enumerate(session.grow(draft), start=1):
            assert session.tree.rank[node] == session.tree.token[node] == path[-1]
            assert session.tree.path_logprob[node] == path_logprob(draft, path)
            assert session.tree.kv_slot[node] == -1


@pytest.mark.parametrize("name", POLICIES)
def test_kv_slots_survive_pruning(name: str) -> None:
    """The draft sets the slot when it reads a node, and compacts its cache by it after verification."""
    session = TreeSession(name, **({"budget": 10} if name in PRUNES else {}))
    grower = session.grower
    grower.set_root(0)
    slots: dict[Ranks, int] = {}
    while len(grower.frontier):
        paths = session.paths
        for node in grower.frontier[grower.frontier > ROOT]:
            slots[paths[node - 1]] = grower.tree.kv_slot[node] = len(slots)
        shape = (len(grower.frontier), session.policy.size.proposals)
        logprobs = np.linspace(-0.7, -2.5, shape[1], dtype=np.float32)
        grower.grow(np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)), np.tile(logprobs, (shape[0], 1)))
    grown = len(session.paths)
    grower.prune()
    assert len(session.paths) < grown or name not in PRUNES, "nothing was pruned"
    size = int(grower.tree.size[0])
    assert grower.tree.kv_slot[1:size].tolist() == [slots.get(path, -1) for path in session.paths]


@pytest.mark.parametrize("name", POLICIES)
def test_replay_and_the_runtime_grow_the_same_tree(name: str) -> None:
    """Replay knows all proposals beforehand; the runtime's arrive level by level."""
    four_children = {"sage": {"k": 4}, "eagle2": {"k": 4}, "wetap": {"top_k": 4}}  # as many as the trace has
    policy = parse_policy({"policy": name, **four_children.get(name, {})})
    packed = pack_trace(random_trace(3, num_prompts=2))
    proposals = packed.proposals
    tree = new_tree(policy.size.grown)
    work = new_workspace(policy.size.grown)
    state, params, grower = np.zeros(STATE_SIZE), policy.encode(), TreeGrower(policy)
    policies.reset(kind_number(policy), params, state)
    grower.reset()
    for turn, row in enumerate(packed.root_row):
        set_root(tree, 0, row)
        work.frontier[0], count = ROOT, 1
        grower.set_root(0)
        rows = np.array([row])
        while count:
            assert len(grower.frontier) == count
            frontier = grower.frontier
            rows = np.array([tree.row[node] for node in frontier])
            count = policies.grow(kind_number(policy), params, state, tree, work, count, proposals)
            grower.grow(*(proposals[part][rows, : policy.size.proposals] for part in ("token", "logprob")))
        policies.prune(kind_number(policy), params, state, tree, work)
        grower.prune()
        for replayed, live in zip(fields(tree), fields(grower.tree), strict=True):
            assert np.array_equal(replayed, live)
        policies.update(kind_number(policy), params, state, turn % 5, False)
        grower.update(turn % 5)


def fields(tree: Tree) -> list[np.ndarray]:
    size = int(tree.size[0])
    return [
        array[:size]
        for array in (tree.token, tree.parent, tree.depth, tree.path_logprob, tree.path_probability, tree.rank)
    ]


# The settings of the papers and releases, and the limits of their trees: nodes, grown nodes, depth, width, proposals.
DEFAULTS: list[tuple[dict[str, Any], tuple[int, int, int, int, int]]] = [
    ({"policy": "chain", "depth": 5, "p_min": 0.0, "n_min": 0}, (5, 5, 5, 1, 1)),
    ({"policy": "eagle2", "depth": 7, "k": 10, "budget": 60, "floor": 0.0}, (60, 10 + 6 * 100, 7, 10, 10)),
    (
        {
            **{"policy": "wetap", "length": 8, "w_min": 16, "w_max": 128, "gamma": 1.2, "alpha": 0.6},
            **{"budget": 64, "top_k": 10, "top_p": 0.9, "nucleus": "top_k", "entropy_of": "path"},
        },
        (64, 10 + 7 * 128, 8, 128, 10),
    ),
    (
        {
            **{"policy": "sage", "d_min": 3, "d_max": 8, "w_min": 2, "w_max": 10, "k": 10, "n_max": 64},
            **{"confidence": "previous", "depth_cap": None, "window": 10, "lower": 2.0, "upper": 3.0},
            **{"below_threshold": "leaf", "threshold": 0.1, "threshold_on": "path"},
            **{"rounding": "nearest", "plan": "current"},
        },
        (64, 64, 8, 64, 10),
    ),
]


@pytest.mark.parametrize(("settings", "limits"), DEFAULTS)
def test_defaults_are_those_of_the_publications(settings: dict[str, Any], limits: tuple[int, ...]) -> None:
    policy = parse_policy({"policy": settings["policy"]})
    assert policy.model_dump() == settings
    size = policy.size.nodes, policy.size.grown, policy.size.depth, policy.size.width, policy.size.proposals
    assert size == limits


CALIBRATION = {
    **{"draft": "d", "draft_sha256": "1", "workload_sha256": "2", "num_tokens": 100, "log_loss": 0.1},
    **{"raw_log_loss": 0.2, "curves": [[[0.1, 0.2]]]},
}
MISTAKES: list[tuple[Any, str]] = [
    ({"policy": "sagee"}, "unknown tree policy 'sagee'; did you mean 'sage'?"),
    ({"policy": "bush"}, "unknown tree policy 'bush'; known: chain, sage"),
    ({"depth": 5}, "unknown tree policy None; known: chain, sage"),
    ("chain", "unknown tree policy None; known: chain, sage"),
    ({"policy": ["sage"]}, "unknown tree policy "),
    ({"policy": "sage", "dmax": 8}, "unknown key 'dmax'; did you mean 'd_max'?"),
    ({"policy": "chain", "w_max": 8}, "unknown key 'w_max'; known: depth, n_min, p_min, policy"),
    ({"policy": "chain", "depth": 25}, "depth: input should be less than or equal to 24; got 25; fix that value"),
    ({"policy": "chain", "p_min": 1.5}, "p_min: input should be less than or equal to 1; got 1.5"),
    ({"policy": "chain", "n_min": 6}, "n_min must be at most depth, which is 5"),
    ({"policy": "eagle2", "budget": 129}, "budget: input should be less than or equal to 128; got 129"),
    ({"policy": "eagle2", "floor": 1.0}, "floor: input should be less than 1; got 1.0"),
    ({"policy": "wetap", "w_min": 20, "w_max": 10}, "w_min must be at most w_max, which is 10"),
    ({"policy": "wetap", "w_max": 257}, "w_max: input should be less than or equal to 256; got 257"),
    ({"policy": "wetap", "top_k": 17}, "top_k: input should be less than or equal to 16; got 17"),
    ({"policy": "sage", "lower": 3.5}, "lower must be at most upper, which is 3.0"),
    ({"policy": "sage", "depth_cap": 2}, "d_min must be at most depth_cap, which is 2"),
    ({"policy": "sage", "k": 1}, "k: input should be greater than or equal to 2; got 1"),  # log k divides in eq. 9
    ({"policy": "sage", "window": 33}, "window: input should be less than or equal to 32; got 33"),
    ({"policy": "static", "paths": [[0], [1], [0]]}, "paths must differ from each other; drop the repeated ones"),
    ({"policy": "static", "paths": [[0], [0, 0, 0]]}, "path [0, 0, 0] needs its parent [0, 0]; add it"),
    *(
        ({"policy": "static", "paths": [[0], path]}, f"a path has 1 to 24 ranks of 0 to 15; got {path}")
        for path in ([16], [0, -1], [], [0] * 25)
    ),
    ({"policy": "static", "paths": []}, "paths: tuple should have at least 1 item"),
    ({"policy": "static", "paths": [["0"]]}, "paths.0.0: input should be a valid integer"),
    ({"policy": "priced", "worth": 0.0}, "worth: "),
    ({"policy": "priced", "prices": {"contexts": [5, 5]}}, "contexts must be ascending"),
    ({"policy": "priced", "prices": {"contexts": [1, 2]}}, "level must have one row of at least two prices for each"),
    ({"policy": "priced", "prices": {"verify": [[1.0]]}}, "verify must have one row"),
    ({"policy": "priced", "calibration": CALIBRATION}, f"curves must have {len(GRID)} values for each rank"),
]


@pytest.mark.parametrize(("tree", "message"), MISTAKES)
def test_a_mistake_is_one_line_that_names_its_source(tree: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_policy(tree, source="profile.json: points.0.tree")
    # New policies may add known words.
    assert str(refused.value).startswith("profile.json: points.0.tree: ") and "\n" not in str(refused.value)
    assert message.split("; known:")[0] in str(refused.value)
