"""Additive attention masks for trees after a visible prefix.

A sliding window is measured in positions, not in cache slots, because siblings of a tree have the same position. Tokens
are located by their *offset*, the position relative to the end of the prefix; offsets in the prefix are negative.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.modeling.host import to_device
from autotune.trees.limits import Ints

TreeMask = NDArray[np.float32]
LayerMasks = Tensor | dict[str, Tensor]
"""The masks of a model's layers as transformers expects them: of models with several layer types, by layer type."""


class TreeMasks:
    """Makes the masks of a model whose layer types have these attention windows; None sees everything."""

    def __init__(self, windows: Mapping[str, int | None], *, dtype: torch.dtype, device: torch.device) -> None:
        self.windows, self.mask_value = dict(windows), float(torch.finfo(dtype).min)
        self._dtype, self._device = dtype, device

    def write(self, tree_mask: TreeMask, prefix: int, row_offsets: Ints, column_offsets: Ints) -> LayerMasks:
        """Masks [1, 1, rows, visible prefix + columns] for ``tree_mask`` [rows, columns] after ``prefix`` tokens."""
        deepest, masks = int(row_offsets.max()), {}
        for name, window in self.windows.items():
            if window is None or prefix + deepest < window:
                masks[name] = self._mask(prefix, tree_mask)
            else:
                masks[name] = self._of_window(window, prefix, tree_mask, row_offsets, column_offsets)
        return by_layer_type(masks)

    def _mask(self, num_visible: int, tree_mask: TreeMask) -> Tensor:
        shape = 1, 1, len(tree_mask), num_visible + tree_mask.shape[1]
        mask = torch.zeros(shape, dtype=self._dtype, device=self._device)
        mask[0, 0, :, num_visible:] = to_device(tree_mask, self._device)
        return mask

    def _of_window(
        self, window: int, prefix: int, tree_mask: TreeMask, row_offsets: Ints, column_offsets: Ints
    ) -> Tensor:
        """The mask of a sliding layer, from the first token that a token at offset 0 sees."""
        first, deepest = first_visible(prefix, window), int(row_offsets.max())
        last_hidden = (row_offsets - window)[:, None]
        if deepest >= window:
            tree_mask = np.where(column_offsets <= last_hidden, np.float32(self.mask_value), tree_mask)
        mask = self._mask(prefix - first, tree_mask)
        # Offsets in the prefix that deeper rows no longer see.
        leaving = np.arange(first, min(prefix, first + deepest + 1)) - prefix
        head = np.where(leaving <= last_hidden, np.float32(self.mask_value), np.float32(0.0))
        mask[0, 0, :, : len(leaving)] = to_device(head, self._device)
        return mask


def by_layer_type(masks: dict[str, Tensor]) -> LayerMasks:
    """The only mask of a model with one layer type."""
    return masks if len(masks) > 1 else next(iter(masks.values()))


def first_visible(length: int, window: int | None) -> int:
    """The first cached token that a token after ``length`` others sees."""
    return 0 if window is None else max(0, length - window + 1)
