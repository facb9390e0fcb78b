"""Drafts that are tables of probabilities, and a policy driven with them as the runtime drives it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from autotune.trees.policy import NOTHING, TreeGrower, parse_policy
from autotune.trees.tree import ROOT, Retrieved, Tree
from tests.obvious import tokens_to

Ranks = tuple[int, ...]
"""A node, as its tokens from the root's child on. The token of a candidate is its rank in these drafts."""

Draft = Callable[[Ranks], list[float]]
"""Probabilities of a node's candidates, most probable first."""


class TreeSession:
    """Rounds of one request: a policy driven level by level with a table of probabilities as its draft."""

    def __init__(self, policy: str, **hyperparameters: Any) -> None:
        self.policy = parse_policy({"policy": policy, **hyperparameters})
        self.grower = TreeGrower(self.policy)
        self.grower.reset()
        self.expanded: list[list[Ranks]] = []
        """The nodes expanded in the last round, level by level."""
        self.grown: list[Ranks] = []
        """The last tree before pruning."""

    @property
    def tree(self) -> Tree:
        return self.grower.tree

    def grow(self, draft: Draft, context_tokens: int = 0, retrieved: Retrieved = NOTHING) -> list[Ranks]:
        """The tree of one round, in the order of its nodes."""
        self.expanded = []
        self.grower.set_root(-1, context_tokens, retrieved)
        while len(self.grower.frontier):
            frontier = [path_of(self.tree, int(node)) for node in self.grower.frontier]
            self.expanded.append(frontier)
            k = self.policy.size.proposals
            logprobs = np.stack([logprobs_of(draft, path, k) for path in frontier])
            self.grower.grow(np.tile(np.arange(k, dtype=np.int32), (len(frontier), 1)), logprobs)
        self.grown = self.paths
        self.grower.prune()
        return self.paths

    @property
    def paths(self) -> list[Ranks]:
        return [path_of(self.tree, node) for node in range(1, int(self.tree.size[0]))]

    def update(self, *accepted: int, first_token: int = -1) -> None:
        for length in accepted:
            self.grower.update(length, first_token)


def path_of(tree: Tree, node: int) -> Ranks:
    return tuple(tokens_to(tree, node)[1:])


def logprobs_of(draft: Draft, path: Ranks, k: int) -> np.ndarray:
    """Log-probabilities of the ``k`` best candidates, float32 as a draft returns them; -inf where the table has no
    more.
    """
    probabilities = np.zeros(k)
    known = draft(path)[:k]
    probabilities[: len(known)] = known
    with np.errstate(divide="ignore"):
        return np.log(probabilities.astype(np.float32))


def path_logprob(draft: Draft, path: Ranks) -> float:
    """Cumulative log-probability, summed from the root as a tree does it, so that it is equal to the last bit."""
    total = 0.0
    for level, rank in enumerate(path):
        total += float(logprobs_of(draft, path[:level], rank + 1)[rank])
    return total


def same_everywhere(*probabilities: float) -> Draft:
    return lambda path: list(probabilities)


def by_table(table: dict[Ranks, list[float]]) -> Draft:
    """A draft without candidates for nodes that are not in the table."""
    return lambda path: table.get(path, [])


def random_draft(seed: int, sharpness: float) -> Draft:
    """A deterministic draft whose candidates are drawn from a Dirichlet distribution."""

    @functools.cache
    def draft(path: Ranks) -> list[float]:
        probabilities = np.random.default_rng([seed, 1, *path]).dirichlet(np.full(20, sharpness))
        return sorted(probabilities.tolist(), reverse=True)

    return draft


def tied_draft(seed: int) -> Draft:
    """A deterministic draft of probabilities 1, 1/2, 1/4 and 1/16, so that cumulative probabilities are often exactly
    equal, to each other and to their parent's. Some nodes have no candidates.
    """
    tables = [[1.0], [0.5, 0.5], [0.5, 0.25, 0.25], [0.25] * 4, [0.25] * 3 + [0.0625] * 4, [0.0625] * 16, [1.0] * 2, []]

    @functools.cache
    def draft(path: Ranks) -> list[float]:
        number = int(np.random.default_rng([seed, 2, *path]).integers(len(tables)))
        return tables[number] if path else [0.5, 0.25, 0.25]

    return draft


def small_wetap(rng: np.random.Generator) -> dict[str, Any]:
    """Random hyperparameters whose trees are far smaller than the paper's."""
    w_min = int(rng.choice([1, 2, 3, 6, 12]))
    return {
        "length": int(rng.integers(1, 9)),
        "w_min": w_min,
        "w_max": w_min + int(rng.integers(0, 20)),
        "gamma": float(rng.choice([0.2, 0.5, 1.0, 1.2, 4.0])),
        "alpha": float(rng.choice([0.0, 0.1, 0.3, 0.6, 0.9, 1.0])),
        "budget": int(rng.choice([1, 3, 8, 16, 32, 64])),
        "top_k": int(rng.choice([1, 2, 4, 10, 16])),
        "top_p": float(rng.choice([0.3, 0.7, 0.9, 1.0])),
    }


def assert_is_tree(tree: Tree) -> None:
    """Assert that nodes are level by level, each after its parent, a level deeper and not more probable, and that no
    child is repeated.
    """
    size = int(tree.size[0])
    assert (tree.parent[ROOT], tree.depth[ROOT], tree.path_logprob[ROOT], tree.rank[ROOT]) == (-1, 0, 0.0, -1)
    for node in range(1, size):
        parent = tree.parent[node]
        assert ROOT <= parent < node
        assert tree.depth[node] == tree.depth[parent] + 1
        assert tree.path_logprob[node] <= tree.path_logprob[parent]
    assert (np.diff(tree.depth[:size]) >= 0).all(), "level by level"
    children = list(zip(tree.parent[1:size].tolist(), tree.rank[1:size].tolist(), strict=True))
    assert len(set(children)) == len(children)
