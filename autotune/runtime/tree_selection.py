"""The implementation of the tree operations that a round runs: kernels where they serve and pass a check, else torch's operations."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from autotune.modeling.graph_runner import EagerNotice
from autotune.runtime.device_trees import DeviceTree
from autotune.runtime.tree_operations import Proposals, TensorTrees, TreeOperations, grown
from autotune.trees.tree import ROOT

NUM_CHECKED = 4  # trees that kernels must grow as torch's operations do, before they are used


def tree_operations(trees: TensorTrees, mode: str) -> TreeOperations:
    """Kernels of Triton where rounds are captured one operation by one; else ``trees`` itself, which mode ``compile`` fuses.

    Kernels are compiled here, and checked on this device, so that a Triton that does not work costs speed and no tokens.
    """
    if mode != "cuda-graph" or importlib.util.find_spec("triton") is None:
        return trees
    try:
        from autotune.runtime.triton_trees import triton_trees

        kernels = triton_trees(trees)
        problem = first_difference(trees, kernels, num_trees=NUM_CHECKED)
    except Exception as error:  # compilers and drivers raise errors of many kinds
        lines = str(error).strip().splitlines()
        problem = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if problem is None:
        return kernels
    warnings.warn(
        f"Triton kernels of {trees.policy.policy} trees cannot be used ({problem}); torch's operations run in their place",
        EagerNotice,
        stacklevel=2,
    )
    return trees


def first_difference(expected: TensorTrees, found: TreeOperations, *, num_trees: int, seed: int = 0) -> str | None:
    """Where two implementations first differ on random trees; None if nowhere."""
    rng = np.random.default_rng(seed)
    for number in range(num_trees):
        proposals = list(_random_proposals(expected, rng))
        root = torch.tensor([7], device=expected.device)
        trees = grown(expected, proposals, root)
        given = _targets(trees.packed_tree, rng)
        results = (*trees, expected.verification_step(trees.packed_tree), expected.accepted(trees.packed_tree, given))
        others = grown(found, proposals, root)
        outputs = (*others, found.verification_step(others.packed_tree), found.accepted(others.packed_tree, given))
        names = ("levels", "pruned tree", "verification", "accepted path")
        for name, result, output in zip(names, results, outputs, strict=True):
            pairs = zip(_flat(result), _flat(output), strict=True)
            if not all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs):
                return f"{name} of random tree {number} differ"
    return None


def _flat(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from _flat(value)


def _random_proposals(trees: TensorTrees, rng: np.random.Generator) -> Iterator[Proposals]:
    """Proposals with ties and with tokens that are not proposed (log-probability -inf)."""
    steps = 2.0 ** rng.integers(0, 12)  # log-probabilities are multiples of 1 / steps: the fewer, the more ties
    absent = rng.choice([0.0, 0.1, 0.6])
    for shape in trees.proposal_shapes:
        logprobs = np.floor(-steps * rng.exponential(2.0, shape)) / steps
        logprobs[rng.random(shape) < absent] = -np.inf
        logprobs = -np.sort(-logprobs, axis=1)
        tokens = rng.permuted(np.tile(np.arange(3 * shape[1]), (shape[0], 1)), axis=1)[:, : shape[1]]
        yield Proposals(
            torch.from_numpy(tokens.copy()).to(trees.device), torch.from_numpy(logprobs).float().to(trees.device)
        )


def _targets(packed_tree: Tensor, rng: np.random.Generator) -> Tensor:
    """The target's token after each node: that of its last child, or another one."""
    tree = DeviceTree.unpacked(packed_tree.cpu())
    tokens = rng.integers(0, 50, len(tree.token))
    for token, parent in zip(tree.token[ROOT + 1 :].tolist(), tree.parent[ROOT + 1 :].tolist(), strict=True):
        if rng.random() < 0.8:
            tokens[parent] = token
    return torch.from_numpy(tokens).to(packed_tree.device)
