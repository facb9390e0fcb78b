"""Tree operations as Triton kernels. ``triton`` is imported with this module."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from autotune.runtime import triton_kernels as kernels
from autotune.runtime.device_trees import DeviceTree, Eagle2Grower, FixedGrower
from autotune.runtime.tree_operations import Accepted, Level, Proposals, TensorTrees, VerificationStep, grown

Tensors = TypeVar("Tensors", Level, VerificationStep, Accepted)
CHUNK = 32  # candidates that all others are compared with at a time
MASK_ROWS = 16  # rows of the target's mask that one program writes


def triton_trees(trees: TensorTrees) -> TritonTrees:
    """The same operations as kernels."""
    if isinstance(trees.grower, FixedGrower):
        return FixedTritonTrees(trees, trees.grower)
    return Eagle2TritonTrees(trees, trees.grower)


class TritonTrees(ABC):
    """Verification and acceptance as kernels; subclasses grow and prune.

    Args:
        trees: the same operations of torch. What does not depend on proposals is taken from a tree that they grow: padding,
            offsets, columns, and all of a fixed tree but its tokens and log-probabilities.
    """

    def __init__(self, trees: TensorTrees) -> None:
        self.device = trees.device
        self._max_depth = trees.policy.max_depth
        certain = [torch.zeros(shape, device=self.device) for shape in trees.proposal_shapes]
        root = torch.zeros(1, dtype=torch.long, device=self.device)
        levels, self._tree = grown(trees, [Proposals(zeros.long(), zeros) for zeros in certain], root)
        self._levels = [_copied(level) for level in levels]
        self._step = _copied(trees.verification_step(self._tree))
        self._hidden = self._step.tree_mask.new_full((1,), trees.target_mask.hidden)
        self._accepted = _copied(trees.accepted(self._tree, self._tree[0]))
        self._depth = 0

    def plant(self) -> None:
        self._depth = 0

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Level | None:
        assert tokens.is_contiguous() and logprobs.is_contiguous()
        following = self._levels[self._depth] if self._depth < len(self._levels) else None
        self._grow(tokens, logprobs, following)
        self._depth += 1
        return following

    @abstractmethod
    def _grow(self, tokens: Tensor, logprobs: Tensor, following: Level | None) -> None:
        """Add a level and write the tokens, parents and mask of the ``following`` one, if there is one."""

    @abstractmethod
    def pruned(self, root: Tensor) -> Tensor:
        """See ``TreeOperations``."""

    def verification_step(self, packed_tree: Tensor) -> VerificationStep:
        num_tokens = len(self._step.tokens)
        _launch(
            kernels.verification_step,
            *(packed_tree, *self._step, self._hidden, packed_tree.shape[1], num_tokens, self._max_depth),
            num_programs=triton.cdiv(num_tokens, MASK_ROWS),
            ROWS=MASK_ROWS,
            BLOCK=triton.next_power_of_2(num_tokens),
        )
        return self._step

    def accepted(self, packed_tree: Tensor, target_tokens: Tensor) -> Accepted:
        num_nodes = packed_tree.shape[1]
        _launch(
            kernels.accept,
            *(packed_tree, target_tokens, *self._accepted, num_nodes, self._max_depth),
            num_warps=_num_warps(num_nodes),
            FIELDS=len(DeviceTree._fields),
            BLOCK=triton.next_power_of_2(num_nodes),
        )
        return self._accepted


class FixedTritonTrees(TritonTrees):
    """``chain`` without a floor, and ``static``."""

    def __init__(self, trees: TensorTrees, grower: FixedGrower) -> None:
        super().__init__(trees)
        self._keeps_empty_nodes = grower.keeps_empty_nodes
        sizes = [len(level.row) for level in grower.levels]
        root = torch.zeros(1, dtype=torch.long, device=self.device)
        self._row = torch.cat([root, *(level.row for level in grower.levels)])  # of each node's parent in the frontier
        self._nodes = [range(1 + sum(sizes[:depth]), 1 + sum(sizes[: depth + 1])) for depth in range(len(sizes))]
        self._expanded = [nodes[0] + level.expanded for nodes, level in zip(self._nodes, grower.levels, strict=True)]
        self._block, self._width_block = _block(sizes), _block(grower.widths)

    def _grow(self, tokens: Tensor, logprobs: Tensor, following: Level | None) -> None:
        nodes, expanded = self._nodes[self._depth], self._expanded[self._depth]
        _launch(
            kernels.grow_fixed,
            *(self._tree, tokens, logprobs, self._row, expanded),
            following.tokens if following else tokens,  # after the last level nothing is written
            *(nodes[0], len(nodes), len(expanded), self._tree.shape[1], tokens.shape[1]),
            BLOCK=self._block,
            WIDTH_BLOCK=self._width_block,
        )

    def pruned(self, root: Tensor) -> Tensor:
        num_nodes = self._tree.shape[1]
        _launch(
            kernels.prune_fixed,
            *(self._tree, root, num_nodes),
            KEEPS_EMPTY=self._keeps_empty_nodes,
            BLOCK=triton.next_power_of_2(num_nodes),
        )
        return self._tree


class Eagle2TritonTrees(TritonTrees):
    """``eagle2``."""

    def __init__(self, trees: TensorTrees, grower: Eagle2Grower) -> None:
        super().__init__(trees)
        self._policy, self._widths, self._log_floor = grower.policy, grower.widths, grower.log_floor
        num_candidates, num_slots = self._policy.k * (1 + sum(self._widths)), sum(self._widths)

        def buffer(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self._candidate_token = buffer(num_candidates, torch.long)
        self._candidate_logprob = buffer(num_candidates, torch.float64)
        self._candidate_slot = buffer(num_candidates)
        self._candidate_at = buffer(max(1, num_slots))
        self._best = [
            buffer(self._policy.budget) for _ in range(len(self._widths) + 2)
        ]  # before each level, and at last
        self._block = triton.next_power_of_2(self._policy.budget + self._policy.k * max((1, *self._widths)))
        self._width_block = _block(self._widths)

    def _grow(self, tokens: Tensor, logprobs: Tensor, following: Level | None) -> None:
        k, depth = self._policy.k, self._depth
        rows, width = (1, *self._widths)[depth], (*self._widths, 0)[depth]
        first_row = sum((1, *self._widths)[:depth])
        # The first level copies no columns of a mask, and the last one writes nothing for a next level.
        next_tokens, next_parents, _, next_mask, _ = following or (self._levels[-1] if self._levels else [tokens] * 5)
        mask = self._levels[depth - 1].tree_mask if depth else next_mask
        _launch(
            kernels.grow_eagle2,
            *(tokens, logprobs, self._candidate_token, self._candidate_logprob, self._candidate_slot),
            *(self._candidate_at, self._best[depth], self._best[depth + 1], mask),
            *(next_tokens, next_parents, next_mask),
            *(first_row * k, rows * k, first_row - 1, k, width, self._policy.budget),
            *(mask.shape[1], next_mask.shape[1]),
            num_warps=_num_warps(self._block),
            LOG_FLOOR=self._log_floor,
            BLOCK=self._block,
            CHUNK=min(self._block, CHUNK),
            WIDTH_BLOCK=self._width_block,
            COLUMN_BLOCK=64,
        )

    def pruned(self, root: Tensor) -> Tensor:
        num_nodes = self._tree.shape[1]
        block = triton.next_power_of_2(num_nodes)
        _launch(
            kernels.prune_eagle2,
            *(self._tree, root, self._candidate_token, self._candidate_logprob, self._candidate_slot),
            *(self._candidate_at, self._best[-1], num_nodes - 1, self._policy.k, max((1, *self._widths))),
            num_warps=_num_warps(block),
            BLOCK=block,
            CHUNK=min(block, CHUNK),
        )
        return self._tree


def _copied(tensors: Tensors) -> Tensors:
    """Buffers with the contents of ``tensors``."""
    return type(tensors)(*(tensor.clone() for tensor in tensors))


def _block(sizes: Sequence[int]) -> int:
    """A block that holds as many values as each of ``sizes``."""
    return int(triton.next_power_of_2(max((1, *sizes))))


def _num_warps(block: int) -> int:
    """Warps of 32 threads for a comparison of ``block`` values with ``CHUNK`` others, 32 pairs a thread."""
    return max(4, triton.next_power_of_2(block) // 32)


def _launch(kernel: Any, tree: Tensor, *args: Any, num_programs: int = 1, **options: Any) -> None:
    """Run a kernel on the device of its arguments, which need not be the current one."""
    device = tree.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(num_programs,)](tree, *args, **options)
