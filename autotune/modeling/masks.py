"""Additive attention masks for trees after a long, visible prefix, without rewriting the prefix at every step.

A sliding window is measured in positions, not in cache slots, because siblings of a tree have the same position. Tokens
are located by their *offset*, the position relative to the end of the prefix; offsets in the prefix are negative.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.trees.limits import MAX_STEP, Ints

TreeMask = NDArray[np.float32]
LayerMasks = Tensor | dict[str, Tensor]
"""The masks of a model's layers as transformers expects them: of models with several layer types, by layer type."""


class _Slab:
    """A zero mask [1, 1, rows, columns] of which few columns are ever written. Each write clears the one before."""

    def __init__(self, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._mask = torch.zeros(1, 1, MAX_STEP, num_columns, dtype=dtype, device=device)
        self._written: list[tuple[int, int, int]] = []  # rows, first column, end column

    def write(self, num_columns: int, *blocks: tuple[int, TreeMask]) -> Tensor:
        """The first ``num_columns`` columns, with each block written from its first column. Valid until the
        next call.
        """
        if self._mask.shape[3] < num_columns:
            self._mask, self._written = self._mask.new_zeros(1, 1, MAX_STEP, num_columns), []
        for rows, begin, end in self._written:
            self._mask[:, :, :rows, begin:end] = 0.0
        self._written = []
        for begin, block in blocks:
            rows, end = len(block), begin + block.shape[1]
            self._mask[0, 0, :rows, begin:end].copy_(torch.from_numpy(block), non_blocking=True)
            self._written.append((rows, begin, end))
        return self._mask[:, :, : len(blocks[0][1]), :num_columns]


class MaskBuffer:
    """The masks of one model's layers.

    Args:
        windows: attention window by layer type, in tokens up to and including the query; None sees everything.
        capacity: of the KV cache, in tokens.
    """

    def __init__(
        self, windows: Mapping[str, int | None], capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = capacity
        self.mask_value = float(torch.finfo(dtype).min)
        self.windows = dict(windows)
        self._full = _Slab(capacity + MAX_STEP, dtype=dtype, device=device)
        self._sliding = {
            layer_type: _Slab(min(window, capacity) + MAX_STEP, dtype=dtype, device=device)
            for layer_type, window in windows.items()
            if window is not None
        }

    def write(self, tree_mask: TreeMask, prefix: int, row_offsets: Ints, column_offsets: Ints) -> LayerMasks:
        """Masks [1, 1, rows, visible prefix + columns] for ``tree_mask`` [rows, columns] after ``prefix`` tokens. Valid
        until the next call.
        """
        deepest = prefix + int(row_offsets.max())
        is_limited = {name: window is not None and deepest >= window for name, window in self.windows.items()}
        masks = {}
        if not all(is_limited.values()):
            masks = dict.fromkeys(self.windows, self._full.write(prefix + tree_mask.shape[1], (prefix, tree_mask)))
        for name in filter(is_limited.get, is_limited):
            masks[name] = self._write_window(name, prefix, tree_mask, row_offsets, column_offsets)
        return by_layer_type(masks)

    def _write_window(
        self, layer_type: str, prefix: int, tree_mask: TreeMask, row_offsets: Ints, column_offsets: Ints
    ) -> Tensor:
        """The mask of a sliding layer, from the first token that a token at offset 0 sees."""
        window = self.windows[layer_type]
        assert window is not None
        first = first_visible(prefix, window)
        last_hidden = (row_offsets - window)[:, None]
        deepest = int(row_offsets.max())
        # Offsets in the prefix that deeper rows no longer see.
        leaving = np.arange(first, min(prefix, first + deepest + 1)) - prefix
        head = np.where(leaving <= last_hidden, self.mask_value, 0.0).astype(np.float32)
        if deepest >= window:
            tree_mask = np.where(column_offsets <= last_hidden, np.float32(self.mask_value), tree_mask)
        num_columns = prefix - first + tree_mask.shape[1]
        return self._sliding[layer_type].write(num_columns, (prefix - first, tree_mask), (0, head))


def by_layer_type(masks: dict[str, Tensor]) -> LayerMasks:
    """The only mask of a model with one layer type."""
    return masks if len(masks) > 1 else next(iter(masks.values()))


def first_visible(length: int, window: int | None) -> int:
    """The first cached token that a token after ``length`` others sees."""
    return 0 if window is None else max(0, length - window + 1)
