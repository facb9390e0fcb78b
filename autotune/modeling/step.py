"""Input of a forward pass over a few tokens after the prefix: ``Step`` on the host, ``DeviceStep`` on the device.

The KV cache holds the committed prefix, then the uncommitted tokens of earlier steps of the round, then the tokens of
this step. A token's *offset* is its position relative to the end of the prefix; siblings in a tree have the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.modeling.masks import TreeMask
from autotune.trees.limits import Ints


class Step(NamedTuple):
    """n tokens to evaluate."""

    tokens: NDArray[np.int64]  # [n]
    offsets: Ints  # [n]
    tree_mask: TreeMask
    """Additive mask over the uncommitted tokens and the n tokens, [n, uncommitted + n]. It leaves out the prefix, which
    is visible as far as a layer's attention window reaches.
    """
    first_logits: int = 0
    """The token from which on logits are needed: an output head costs time in proportion to tokens and vocabulary."""
    is_final: bool = False
    """Whether all tokens will be committed, so that nothing need be kept to take them back."""

    @property
    def num_uncommitted(self) -> int:
        return self.tree_mask.shape[1] - len(self.tokens)

    @classmethod
    def causal(cls, tokens: NDArray[np.int64], mask_value: float) -> Step:
        """Consecutive tokens, without uncommitted ones before them."""
        count = len(tokens)
        return cls(tokens, np.arange(count), np.triu(np.full((count, count), mask_value, np.float32), 1))


class DeviceStep(NamedTuple):
    """n tokens to evaluate. Everything but the shapes is known to the device only, even the length of the prefix."""

    prefix_state: Tensor  # ``CachedModel.prefix_state``
    tokens: Tensor  # [n]
    offsets: Tensor  # [n]
    tree_mask: Tensor  # as in ``Step``, [n, uncommitted + n]
    column_offsets: Tensor  # offsets of the uncommitted tokens and the n tokens, [uncommitted + n]
    padded_kv_length: int
    padded_crossing_length: int | None = None
    """Padded KV length of the blocks of a draft that cross, where it is another (see ``drafters.blocks.Crossing``)."""

    @property
    def kv_slots(self) -> Tensor:
        """Indices in the KV cache at which the tokens are written, [n]."""
        count, num_columns = len(self.tokens), len(self.column_offsets)
        return self.prefix_state[0] + torch.arange(num_columns - count, num_columns, device=self.tokens.device)

    def masks(self, windows: Mapping[str, int | None], *, mask_value: float) -> dict[str, Tensor]:
        """The masks of ``padded_masks``, computed on the device."""
        num_columns = len(self.column_offsets)
        # Column of the tree mask for each cached token: negative in the prefix, too large in the padding.
        column = torch.arange(self.padded_kv_length, device=self.tree_mask.device) - self.prefix_state[0]
        inside = column.clamp(0, num_columns - 1)
        full = self.tree_mask[:, inside].masked_fill(column >= num_columns, mask_value).masked_fill(column < 0, 0.0)
        masks = {}
        for layer_type, window in windows.items():
            mask = full
            if window is not None:
                offsets = torch.where((column < 0) | (column >= num_columns), column, self.column_offsets[inside])
                mask = full.masked_fill(offsets <= (self.offsets - window)[:, None], mask_value)
            masks[layer_type] = mask[None, None]
        return masks
