"""Additive attention masks over a long, fully visible prefix, without writing the prefix anew every step."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.trees.tree import MAX_STEP


class MaskBuffer:
    """A slab of zeros in which only the last few columns are ever written: [1, 1, rows, capacity + MAX_STEP].

    The prefix grows during a request, so the columns of the previous block become prefix and are cleared before the
    next block is written.
    """

    def __init__(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.closed = float(torch.finfo(dtype).min)
        self._slab = torch.zeros(1, 1, MAX_STEP, capacity + MAX_STEP, dtype=dtype, device=device)
        self._block: tuple[int, int, int] = (0, 0, 0)  # rows, first column, end column

    def write(self, block: NDArray[np.float32], prefix: int) -> Tensor:
        """A view [1, 1, rows, prefix + columns]: ``block`` [rows, columns] behind ``prefix`` open columns. Valid until
        the next call.
        """
        rows, begin, end = self._block
        self._slab[:, :, :rows, begin:end] = 0.0
        rows, columns = block.shape
        self._block = (rows, prefix, prefix + columns)
        self._slab[0, 0, :rows, prefix : prefix + columns] = torch.from_numpy(block)
        return self._slab[:, :, :rows, : prefix + columns]
