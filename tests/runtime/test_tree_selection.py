"""Kernels of Triton are used where they serve, and only if they do what torch's operations do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.modeling.graph_runner import EagerNotice
from autotune.runtime.device_trees import device_grower
from autotune.runtime.tree_operations import Accepted, Level, MaskFormat, TensorTrees, VerificationStep
from autotune.runtime.tree_selection import first_difference, tree_operations
from autotune.trees.policy import parse_policy

CPU = torch.device("cpu")
TREES: tuple[dict[str, Any], ...] = (
    {"policy": "chain", "depth": 4},
    {"policy": "static", "paths": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]},
    {"policy": "eagle2", "depth": 4, "k": 3, "budget": 10},
)


def tensor_trees(
    tree: dict[str, Any], device: torch.device = CPU, *, padding: int = 2, dtype: torch.dtype = torch.bfloat16
) -> TensorTrees:
    policy = parse_policy(tree)
    grower = device_grower(policy, device)
    assert grower is not None
    return TensorTrees(
        grower,
        device,
        policy=policy,
        level_sizes=[width + padding for width in grower.widths],
        num_tokens=grower.num_nodes + 1 + padding,
        draft_mask=MaskFormat(dtype, torch.finfo(dtype).min),
        target_mask=MaskFormat(torch.float32, torch.finfo(torch.float32).min),
    )


class Wrong(TensorTrees):
    """Tree operations one of whose results is wrong in one element."""

    def __init__(self, trees: TensorTrees, operation: str, field: int = 0) -> None:
        vars(self).update(vars(trees))
        correct = getattr(self, operation)
        setattr(self, operation, lambda *given: self._changed(correct(*given), field))

    def _changed(self, result: Any, field: int) -> Any:
        if result is None:
            return None
        if isinstance(result, Tensor):
            result = result.clone()
            result[field, -1] += 1
            return result
        fields = [one.clone() for one in result]
        fields[field].view(-1)[-1] = 99
        return type(result)(*fields)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree["policy"]))
def test_equal_operations_do_not_differ(tree: dict[str, Any]) -> None:
    assert first_difference(tensor_trees(tree), tensor_trees(tree), num_trees=5) is None


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree["policy"]))
def test_every_wrong_field_is_found(tree: dict[str, Any]) -> None:
    for operation, num_fields, name in (
        ("grow", len(Level._fields), "levels"),
        ("pruned", 7, "pruned tree"),
        ("verification_step", len(VerificationStep._fields), "verification"),
        ("accepted", len(Accepted._fields), "accepted path"),
    ):
        for field in range(num_fields):
            wrong = Wrong(tensor_trees(tree), operation, field)
            found = first_difference(tensor_trees(tree), wrong, num_trees=5)
            assert found is not None and found.startswith(name), (operation, field)


def use_kernels(monkeypatch: pytest.MonkeyPatch, make: Callable[[TensorTrees], TensorTrees]) -> None:
    """``make`` stands for the kernels, and a package named ``triton`` seems to be installed."""
    module = ModuleType("autotune.runtime.triton_trees")
    module.triton_trees = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def test_kernels_serve_captured_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tensor_trees(TREES[2])
    use_kernels(monkeypatch, lambda trees: kernels)
    trees = tensor_trees(TREES[2])
    assert tree_operations(trees, "cuda-graph") is kernels
    assert tree_operations(trees, "compile") is trees and tree_operations(trees, "fixed") is trees


def test_torch_s_operations_run_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    trees = tensor_trees(TREES[2])
    assert tree_operations(trees, "cuda-graph") is trees


def test_wrong_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch, lambda trees: Wrong(trees, "accepted"))
    trees = tensor_trees(TREES[2])
    with pytest.warns(
        EagerNotice, match="Triton kernels of eagle2 trees cannot be used.*accepted path of random tree 0"
    ):
        assert tree_operations(trees, "cuda-graph") is trees


def test_kernels_that_cannot_be_compiled_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(trees: TensorTrees) -> TensorTrees:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    use_kernels(monkeypatch, refuse)
    trees = tensor_trees(TREES[0])
    with pytest.warns(EagerNotice, match=r"of chain trees cannot be used \(RuntimeError: Failed to find C compiler.\)"):
        assert tree_operations(trees, "cuda-graph") is trees
