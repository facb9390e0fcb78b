"""Additive attention masks over a long, visible prefix, without writing the prefix anew every step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.trees.tree import MAX_STEP, Ints

TreeMask = NDArray[np.float32]


class _Slab:
    """Zeros in which few columns are ever written: [1, 1, rows, columns]. What the last write closed is opened again."""

    def __init__(self, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._zeros = torch.zeros(1, 1, MAX_STEP, num_columns, dtype=dtype, device=device)
        self._written: list[tuple[int, int, int]] = []  # rows, first column, end column

    @property
    def num_columns(self) -> int:
        return self._zeros.shape[3]

    def write(self, num_columns: int, *blocks: tuple[int, TreeMask]) -> Tensor:
        """A view of that many columns, with each block at its first column. Valid until the next call."""
        for rows, begin, end in self._written:
            self._zeros[:, :, :rows, begin:end] = 0.0
        self._written = []
        for begin, tree_mask in blocks:
            rows, end = len(tree_mask), begin + tree_mask.shape[1]
            self._zeros[0, 0, :rows, begin:end] = torch.from_numpy(tree_mask)
            self._written.append((rows, begin, end))
        return self._zeros[:, :, : len(blocks[0][1]), :num_columns]


class MaskBuffer:
    """The masks of one model's layers. ``windows`` names the types of its layers: how many tokens up to itself a token
    of each sees, or None for all.

    A token's *place* counts from the end of the prefix; the prefix has the places below 0. A window is measured in
    places, not in columns: siblings of a tree stand at one place.
    """

    def __init__(
        self, windows: Mapping[str, int | None], capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = capacity
        self.mask_value = float(torch.finfo(dtype).min)
        self._windows = dict(windows)
        self._full = _Slab(capacity + MAX_STEP, dtype=dtype, device=device)
        self._sliding = {
            kind: _Slab(min(window, capacity) + MAX_STEP, dtype=dtype, device=device)
            for kind, window in windows.items()
            if window is not None
        }

    def write(
        self, tree_mask: TreeMask, prefix: int, row_offsets: Ints, column_offsets: Ints
    ) -> Tensor | dict[str, Tensor]:
        """Additive masks [1, 1, rows, visible prefix + columns] for ``tree_mask`` [rows, columns] behind ``prefix`` tokens.

        A tensor for models with layers of one type, a dict by type for others, as transformers wants them. Valid until
        the next call.
        """
        deepest = prefix + int(row_offsets.max())
        is_narrow = {kind: window is not None and deepest >= window for kind, window in self._windows.items()}
        full = (
            self._full.write(prefix + tree_mask.shape[1], (prefix, tree_mask)) if not all(is_narrow.values()) else None
        )
        masks = {
            kind: self._write_window(kind, prefix, tree_mask, row_offsets, column_offsets) if narrow else full
            for kind, narrow in is_narrow.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))  # type: ignore[return-value]

    def _write_window(
        self, kind: str, prefix: int, tree_mask: TreeMask, row_offsets: Ints, column_offsets: Ints
    ) -> Tensor:
        """The same, from the first token on that a token at place 0 sees."""
        window = self._windows[kind]
        assert window is not None
        first = first_visible(prefix, window)
        out_of_sight = (row_offsets - window)[:, None]
        ahead = (
            np.arange(first, min(prefix, first + int(row_offsets.max()) + 1)) - prefix
        )  # places some rows do not see
        head = np.where(ahead <= out_of_sight, self.mask_value, 0.0).astype(np.float32)
        if int(row_offsets.max()) >= window:
            tree_mask = np.where(column_offsets <= out_of_sight, np.float32(self.mask_value), tree_mask)
        num_columns = prefix - first + tree_mask.shape[1]
        slab = self._sliding[kind]
        if slab.num_columns < num_columns:
            slab = self._sliding[kind] = _Slab(num_columns, dtype=slab._zeros.dtype, device=slab._zeros.device)
        return slab.write(num_columns, (prefix - first, tree_mask), (0, head))


def first_visible(length: int, window: int | None) -> int:
    """The first cached token that the token behind ``length`` others sees."""
    return 0 if window is None else max(0, length - window + 1)
