"""Tree policies as tensor operations grow the trees of the compiled policies, node by node and bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from autotune.runtime.device_trees import DeviceTree, ancestors, device_grower, is_accepted
from autotune.runtime.tree_operations import Proposals
from autotune.trees.policy import parse_policy
from autotune.trees.tree import ROOT, write_tree_mask
from autotune.trees.verification import accept_path
from tests.trees.drafts import Draft, TreeSession, by_table, logprobs_of, random_draft, tied_draft

CPU = torch.device("cpu")
ROOT_TOKEN = 99
STATIC = [[0], [1], [3], [0, 0], [0, 2], [3, 0], [0, 2, 0], [0, 2, 1], [0, 2, 1, 0]]
TREES: list[dict[str, Any]] = [
    {"policy": "chain", "depth": 1},
    {"policy": "chain", "depth": 6},
    {"policy": "static", "paths": [[0]]},
    {"policy": "static", "paths": [[1], [1, 2], [1, 2, 0]]},
    {"policy": "static", "paths": STATIC},
    {"policy": "eagle2"},
    {"policy": "eagle2", "depth": 4, "k": 3, "budget": 10},
    {"policy": "eagle2", "depth": 5, "k": 4, "budget": 128},
    {"policy": "eagle2", "depth": 4, "k": 8, "budget": 3},
    {"policy": "eagle2", "depth": 4, "k": 3, "budget": 1},
    {"policy": "eagle2", "depth": 6, "k": 1, "budget": 4},
    {"policy": "eagle2", "depth": 1, "k": 5, "budget": 2},
    {"policy": "eagle2", "depth": 6, "k": 4, "budget": 30, "floor": 0.05},
    {"policy": "eagle2", "depth": 3, "k": 2, "budget": 20, "floor": 0.25},
]
DRAFTS = [
    *(random_draft(seed, sharpness) for seed, sharpness in enumerate((0.05, 0.3, 1.0))),
    *(tied_draft(seed) for seed in range(6)),
    by_table({(): [0.6, 0.4], (0,): [1.0]}),  # no children below depth 2
    by_table(
        {(): [0.5, 0.5], (0,): [0.5, 0.5], (1,): [0.5, 0.5]}
    ),  # 0.5 * 0.5 in float32 is just below a floor of 0.25
]


def grown_on_device(tree: dict[str, Any], draft: Draft) -> tuple[DeviceTree, list[Proposals]]:
    """The tree that a draft grows, and what it proposed level by level."""
    policy = parse_policy(tree)
    grower = device_grower(policy, CPU)
    assert grower is not None
    grower.plant(CPU)
    frontier: list[tuple[int, ...]] = [()]
    proposals = []
    for level in range(len(grower.widths) + 1):
        if level > 0:
            assert len(frontier) == grower.widths[level - 1]
        logprobs = np.stack([proposed(draft, path, policy.num_proposals) for path in frontier])
        tokens = torch.arange(policy.num_proposals).repeat(len(frontier), 1)
        proposals.append(Proposals(tokens, torch.from_numpy(logprobs)))
        found = grower.grow(*proposals[-1])
        frontier = [
            (*frontier[row], token) for row, token in zip(found.row.tolist(), found.token.tolist(), strict=True)
        ]
    return grower.pruned(torch.tensor([ROOT_TOKEN])), proposals


def without_empty_nodes(draft: Draft) -> Draft:
    """Nothing is proposed after a node of ``static`` that holds no token."""
    return lambda path: [] if -1 in path else draft(path)


def proposed(draft: Draft, path: tuple[int, ...], k: int) -> np.ndarray:
    """Proposals of an absent node are certain, so that a mistake shows if they are used."""
    return np.zeros(k, np.float32) if -1 in path else logprobs_of(draft, path, k)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: "-".join(str(v) for v in tree.values())[:40])
def test_trees_are_those_of_the_compiled_steps(tree: dict[str, Any]) -> None:
    session = TreeSession(**tree)
    rng = np.random.default_rng(0)
    for draft in (without_empty_nodes(draft) for draft in DRAFTS):
        session.grow(draft)
        expected, found = session.tree, grown_on_device(tree, draft)[0]
        size = int(expected.size[0])
        assert int(found.size) == size
        for name in ("token", "depth", "rank", "path_logprob"):
            given = getattr(found, name)[1:size].numpy()
            assert np.array_equal(given, getattr(expected, name)[1:size]), name
        assert np.array_equal(found.parent[1:size].numpy(), expected.parent[1:size])
        assert (found.token[size:] == -1).all()
        assert found.token[0] == ROOT_TOKEN and found.path_logprob[0] == 0.0
        assert read_in_order(found, session)
        seen = ancestors(found.parent, session.policy.max_depth)
        mask = np.empty((size, size), np.float32)
        write_tree_mask(expected, mask, -1.0)
        assert np.array_equal(seen[:size, :size].numpy(), mask == 0.0)
        for _ in range(20):
            said = rng.integers(0, 3, len(found.token))
            path = np.zeros(40, np.int64)
            length = accept_path(expected, said, path)
            on_path = is_accepted(found, seen, torch.from_numpy(said)).nonzero()[:, 0].tolist()
            assert on_path == [ROOT, *path[:length]]


def read_in_order(found: DeviceTree, session: TreeSession) -> bool:
    """Slots ascend in the order in which the host read the nodes, level by level."""
    expanded = [path for level in session.expanded[1:] for path in level if -1 not in path]
    paths = [(node, path) for node, path in enumerate(session.paths, 1) if -1 not in path]
    slots = {path: int(found.kv_slot[node]) for node, path in paths}
    in_tree = [slots[path] for path in expanded if path in slots]
    return in_tree == sorted(in_tree) and all((slots[path] >= 0) == (path in expanded) for path in slots)


def test_policies_whose_level_sizes_depend_on_proposals_stay_on_the_host() -> None:
    for name, floor in (("sage", {}), ("wetap", {}), ("chain", {"p_min": 0.5}), ("chain", {"n_min": 2})):
        assert device_grower(parse_policy({"policy": name, **floor}), CPU) is None
