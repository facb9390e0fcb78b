"""Tree operations of a round on the device: grow a tree level by level, prune it, verify it, accept a path.

``TreeOperations`` is the interface. ``TensorTrees`` here runs torch's own operations; ``triton_trees.TritonTrees`` runs a few
kernels in their place, where rounds are captured one operation by one. Both give the same values, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from autotune.runtime.device_trees import DeviceGrower, DeviceTree, ancestors, is_accepted
from autotune.trees.policy import Policy


class MaskFormat(NamedTuple):
    """Additive masks of a model: 0 where a token is visible, ``hidden`` where it is not."""

    dtype: torch.dtype
    hidden: float


class Level(NamedTuple):
    """The frontier as tokens of one forward pass of the draft, padded to ``size``."""

    tokens: Tensor  # [size]
    parents: Tensor  # KV slot of each node's parent among the nodes that the draft has read, [size]; -1 for the root
    offsets: Tensor  # [size]
    tree_mask: Tensor  # [size, slots + size]
    column_offsets: Tensor  # [slots + size]


class VerificationStep(NamedTuple):
    """The tree as tokens of one forward pass of the target, padded to ``num_tokens``."""

    tokens: Tensor  # [num_tokens]
    offsets: Tensor  # [num_tokens]
    tree_mask: Tensor  # [num_tokens, num_tokens]


class Accepted(NamedTuple):
    """An accepted path, padded with other nodes to the longest possible one."""

    report: Tensor  # the packed tree, the target's token after each node, and whether it is on the path, [fields + 2, nodes]
    slots: Tensor  # KV slots of the accepted nodes in the draft's cache, [max_depth]
    path: Tensor  # the accepted nodes, the root first, [max_depth + 1]


class TreeOperations(Protocol):
    """The operations of one tree policy. None of them waits for the device. A round plants, grows one level after another and
    prunes; results may be overwritten by the round after it.
    """

    def plant(self) -> None:
        """Begin a tree."""

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Level | None:
        """Add a level from the proposals for the frontier, [width, proposals]. Returns the level that the draft reads next;
        None after the last one.
        """

    def pruned(self, root: Tensor) -> Tensor:
        """The tree to verify below the token ``root`` [1], packed (``DeviceTree.packed``)."""

    def verification_step(self, packed_tree: Tensor) -> VerificationStep:
        """The tree as input of the target."""

    def accepted(self, packed_tree: Tensor, target_tokens: Tensor) -> Accepted:
        """Accept a path by the target's token after each node, [nodes]."""


class Proposals(NamedTuple):
    """The draft's proposals for one level, [width, proposals] each, best first."""

    tokens: Tensor
    logprobs: Tensor


class Grown(NamedTuple):
    """Levels and tree that one growth returned."""

    levels: tuple[Level, ...]
    packed_tree: Tensor


def grown(trees: TreeOperations, proposals: Iterable[Proposals], root: Tensor) -> Grown:
    """Grow a tree from proposals that are known ahead."""
    trees.plant()
    levels = [trees.grow(tokens, logprobs) for tokens, logprobs in proposals]
    return Grown(tuple(level for level in levels if level is not None), trees.pruned(root))


class TensorTrees:
    """Tree operations as operations of torch.

    Args:
        level_sizes: tokens of the draft's forward pass for each of ``grower.widths``.
        num_tokens: tokens of the target's forward pass.
    """

    def __init__(
        self,
        grower: DeviceGrower,
        device: torch.device,
        *,
        policy: Policy,
        level_sizes: Sequence[int],
        num_tokens: int,
        draft_mask: MaskFormat,
        target_mask: MaskFormat,
    ) -> None:
        self.grower, self.device, self.policy = grower, device, policy
        self.level_sizes, self.num_tokens = tuple(level_sizes), num_tokens
        self.draft_mask, self.target_mask = draft_mask, target_mask

    @property
    def proposal_shapes(self) -> list[tuple[int, int]]:
        """Shapes of the proposals for the levels of a tree."""
        return [(width, self.policy.num_proposals) for width in (1, *self.grower.widths)]

    def plant(self) -> None:
        self.grower.plant(self.device)
        self._level = 0
        self._visible = torch.zeros(1, 0, dtype=torch.bool, device=self.device)  # [frontier, slots]
        self._offsets = torch.zeros(0, dtype=torch.long, device=self.device)  # [slots]
        self._first_parent = -1  # slot of the first node of the level above; the root has none

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Level | None:
        frontier = self.grower.grow(tokens, logprobs)
        if self._level == len(self.level_sizes):
            return None
        size, width = self.level_sizes[self._level], self.grower.widths[self._level]
        first_slot, padding = self._visible.shape[1], size - width
        itself = torch.eye(width, dtype=torch.bool, device=self.device)
        self._visible = torch.cat([self._visible[frontier.row], itself], 1)
        offsets = torch.full((size,), self._level, device=self.device)
        level = Level(
            tokens=pad(frontier.token.clamp(min=0), (0, padding)),
            parents=pad(frontier.row + self._first_parent, (0, padding)),
            offsets=offsets,
            tree_mask=_additive(self._visible, padding, self.draft_mask),
            column_offsets=torch.cat([self._offsets, offsets]),
        )
        self._offsets = torch.cat([self._offsets, offsets[:width]])
        self._level, self._first_parent = self._level + 1, first_slot
        return level

    def pruned(self, root: Tensor) -> Tensor:
        return self.grower.pruned(root).packed

    def verification_step(self, packed_tree: Tensor) -> VerificationStep:
        tree = DeviceTree.unpacked(packed_tree)
        padding = self.num_tokens - len(tree.token)
        tokens, offsets = pad(tree.token.clamp(min=0), (0, padding)), pad(tree.depth, (0, padding))
        visible = ancestors(tree.parent, self.policy.max_depth)
        return VerificationStep(tokens, offsets, _additive(visible, padding, self.target_mask))

    def accepted(self, packed_tree: Tensor, target_tokens: Tensor) -> Accepted:
        tree = DeviceTree.unpacked(packed_tree)
        is_on_path = is_accepted(tree, ancestors(tree.parent, self.policy.max_depth), target_tokens)
        path = is_on_path.byte().sort(descending=True, stable=True).indices[: self.policy.max_depth + 1]
        report = torch.cat([packed_tree, torch.stack([target_tokens, is_on_path.long()])])
        return Accepted(report, tree.kv_slot[path[1:]], path)


def _additive(visible: Tensor, padding: int, mask: MaskFormat) -> Tensor:
    """The additive mask of ``visible`` [rows, columns], padded by as many rows and columns."""
    shape = visible.shape[0] + padding, visible.shape[1] + padding
    tree_mask = torch.full(shape, mask.hidden, dtype=mask.dtype, device=visible.device)
    tree_mask[: visible.shape[0], : visible.shape[1]].masked_fill_(visible, 0.0)
    return tree_mask
