"""Every reading of SAGE against a plain implementation of the paper, over rounds of random requests."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from autotune.trees.policy import TreeGrower, parse_policy
from tests.trees.drafts import assert_is_tree
from tests.trees.reference_sage import Path, ReferenceSage

ROUNDS_OF_A_REQUEST, NUM_ROWS, NUM_CANDIDATES = 25, 256, 8
OPTIONS = {
    "below_threshold": ("leaf", "drop"),
    "threshold_on": ("path", "token"),
    "rounding": ("nearest", "floor", "ceil"),
    "plan": ("current", "previous"),
    "confidence": ("previous", "current"),
}
READINGS = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]


class HashedDraft:
    """A draft whose candidates depend on a hash of the path: rows of a table of sorted log-probabilities, as
    float32.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sharpness = rng.choice([0.05, 0.2, 0.6], NUM_ROWS)
        tables = np.stack([rng.dirichlet(np.full(NUM_CANDIDATES + 4, each)) for each in sharpness])
        probabilities = -np.sort(-tables)[:, :NUM_CANDIDATES]
        probabilities[probabilities < 1e-6] = 0.0  # candidates that the draft does not propose
        with np.errstate(divide="ignore"):
            self.logprobs = np.log(probabilities.astype(np.float32))
        self.as_lists = self.logprobs.astype(np.float64).tolist()
        self.root = 0

    def row(self, path: Path) -> int:
        row = self.root
        for rank in path:
            row = (row * 37 + rank * 11 + 5) % NUM_ROWS
        return row

    def __call__(self, path: Path) -> list[float]:
        return self.as_lists[self.row(path)]


DRAFTS = [HashedDraft(seed) for seed in range(4)]


def random_hyperparameters(rng: Generator) -> dict[str, Any]:
    d_min, w_min = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    d_max = d_min + int(rng.integers(0, 4))
    return {
        "d_min": d_min,
        "d_max": d_max,
        "w_min": w_min,
        "w_max": w_min + int(rng.integers(0, 6)),
        "k": int(rng.integers(2, NUM_CANDIDATES + 1)),
        "n_max": int(rng.choice([1, 4, 8, 16, 32])),
        "threshold": float(rng.choice([0.0, 0.03, 0.1, 0.4])),
        "depth_cap": int(rng.integers(d_min, d_max + 4)),
        "window": int(rng.integers(1, 6)),
        "lower": float(rng.choice([0.5, 1.0])),
        "upper": float(rng.choice([1.0, 2.0])),
    }


def grown(grower: TreeGrower, draft: HashedDraft) -> tuple[list[Path], set[Path]]:
    """The paths of one round's tree, and those of the nodes that the draft read besides the root."""
    paths: list[Path] = [()]
    read: set[Path] = set()
    grower.set_root(0)
    tokens = np.tile(np.arange(grower.policy.size.proposals, dtype=np.int32), (len(grower.tree.token), 1))
    while len(grower.frontier):
        frontier = [paths[node] for node in grower.frontier]
        read.update(frontier)
        logprobs = draft.logprobs[[draft.row(path) for path in frontier], : grower.policy.size.proposals]
        grower.grow(tokens[: len(frontier)], logprobs)
        size = int(grower.tree.size[0])
        parents, ranks = grower.tree.parent[len(paths) : size].tolist(), grower.tree.rank[len(paths) : size].tolist()
        paths += [(*paths[parent], rank) for parent, rank in zip(parents, ranks, strict=True)]
    return paths[1:], read - {()}


@pytest.mark.parametrize("num_rounds", [200, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: "-".join(str(each)[:8] for each in reading.values()))
def test_every_reading_agrees_with_the_reference(reading: dict[str, Any], num_rounds: int) -> None:
    rng = np.random.default_rng(READINGS.index(reading))
    num_nodes = num_deep = 0
    for _ in range(num_rounds // ROUNDS_OF_A_REQUEST):
        hyperparameters = {**random_hyperparameters(rng), **reading}
        policy = parse_policy({"policy": "sage", **hyperparameters})
        grower, reference = TreeGrower(policy), ReferenceSage(**hyperparameters)
        draft = DRAFTS[int(rng.integers(len(DRAFTS)))]
        for _ in range(ROUNDS_OF_A_REQUEST):
            draft.root = int(rng.integers(NUM_ROWS))
            expected, expected_read = reference.round(draft)
            paths, read = grown(grower, draft)
            assert_is_tree(grower.tree)
            assert set(paths) == expected, hyperparameters
            assert read == expected_read, hyperparameters
            accepted = int(rng.integers(0, 5))
            reference.verify(accepted)
            grower.update(accepted)
            num_nodes += len(paths)
            num_deep += max(map(len, paths), default=0) > 2
    assert num_nodes > num_rounds and num_deep > num_rounds // 40, "the random trees are too small"


def test_planned_shapes_do_not_depend_on_this_round() -> None:
    """With ``plan="previous"`` two drafts that differ after the first round's root only give the same second shape."""
    one, other = HashedDraft(0), HashedDraft(1)
    shapes = []
    for draft in (one, other):
        grower = TreeGrower(parse_policy({"policy": "sage", "plan": "previous", "k": NUM_CANDIDATES}))
        first, _ = grown(grower, one)
        draft.root = 17
        shapes.append((first, grown(grower, draft)[0]))
        one.root = 0
    assert shapes[0] == shapes[1] and len(shapes[0][1]) > 3


def test_a_planned_node_that_the_draft_does_not_propose_holds_no_token() -> None:
    grower = TreeGrower(parse_policy({"policy": "sage", "plan": "previous", "k": 2, "w_min": 2, "w_max": 2}))
    grower.set_root(0)
    certain = np.array([[0.0, -math.inf]], np.float32)
    while len(grower.frontier):
        count = len(grower.frontier)
        grower.grow(np.tile(np.array([[7, 8]], np.int32), (count, 1)), np.tile(certain, (count, 1)))
    tree, size = grower.tree, int(grower.tree.size[0])
    is_proposed = tree.path_logprob[1:size] > -math.inf
    assert 0 < is_proposed.sum() < size - 1
    assert (tree.token[1:size][is_proposed] == 7).all() and (tree.token[1:size][~is_proposed] == -1).all()
