"""The outputs of a target's layers that a draft has yet to read, at fixed addresses, so that captured steps of the
target write them and captured steps of the draft read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from autotune.modeling.host import select
from autotune.trees.limits import MAX_STEP, Ints

NUM_ROWS = 2 * MAX_STEP


class FeatureRows:
    """Rows of each layer, [``NUM_ROWS``, hidden]. A forward pass of n tokens writes ``begin`` and the n - 1 rows after
    it. A draft holds the rows that it will read; later passes write after them, until it releases all.
    """

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layers: dict[int, Tensor] = {}
        self.begin = 0
        self._end = 0  # of the latest forward pass
        self._held = 0  # rows before this one are held
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device

    def next_pass(self, layers: Sequence[int], num_tokens: int) -> Ints:
        """The rows of a forward pass of n tokens, [n]. Layers that are new are allocated."""
        for layer in layers:
            if layer not in self.layers:
                self.layers[layer] = torch.zeros(NUM_ROWS, self._hidden_size, dtype=self._dtype, device=self._device)
        self.begin, self._end = self._held, self._held + num_tokens
        return np.arange(self.begin, self._end)

    def write(self, hidden: Mapping[int, Tensor]) -> None:
        """Write the rows of a forward pass of n tokens, [n, hidden] for each layer."""
        rows = self.next_pass([*hidden], len(next(iter(hidden.values()))))
        for layer, states in hidden.items():
            self.layers[layer][rows[0] : rows[-1] + 1] = states

    @property
    def is_full(self) -> bool:
        """Whether the draft must read what it holds before it can hold rows of the latest pass."""
        return self._end > NUM_ROWS - MAX_STEP

    def hold(self, tokens: Ints) -> list[int]:
        """Hold the rows of tokens of the latest forward pass, which are ascending; returns their numbers."""
        rows = self.begin + tokens
        if self.is_full:  # nothing else is held
            for states in self.layers.values():
                states[: len(rows)] = select(states, rows, 0)
            rows = np.arange(len(rows))
        self._held = int(rows[-1]) + 1
        return rows.tolist()

    def release(self) -> None:
        """The rows were read."""
        self._held = 0
