"""The input of a captured step as one array of integers, which a single copy brings to the device.

The array holds, in this order, the number of uncommitted tokens; the length of the prefix for each padded KV length;
the tokens, their offsets and the model's own integers of each token; the offsets of the uncommitted tokens and the n
tokens, where a layer has a sliding window; and the tree mask in bits. The captured work unpacks it and makes the
additive masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autotune.modeling.graph_runner import GraphKey
from autotune.modeling.masks import TreeMask
from autotune.modeling.step import Step
from autotune.trees.limits import Ints

WORD_BITS = 64


def padded_columns(num_columns: int, least: int) -> int:
    """A number of columns of the tree mask, padded to words, doubled until they suffice."""
    padded = max(least, WORD_BITS)
    while padded < num_columns:
        padded *= 2
    return padded


def pack(step: Step, prefixes: Sequence[int], rows: Ints, column_offsets: Ints | None, num_columns: int) -> Ints:
    """Pack a step of n tokens.

    Args:
        prefixes: length of the prefix for each padded KV length.
        rows: the model's own integers of each token, [rows, n].
        column_offsets: offsets of the uncommitted tokens and the n tokens; None if no layer has a window.
        num_columns: padded number of columns of the tree mask.
    """
    offsets = np.zeros(0 if column_offsets is None else num_columns, np.int64)
    if column_offsets is not None:
        offsets[: len(column_offsets)] = column_offsets
    header = np.array([step.num_uncommitted, *prefixes])
    bits = _packed_bits(step.tree_mask, num_columns)
    return np.concatenate([header, step.tokens, step.offsets, rows.ravel(), offsets, bits.ravel()])


def _packed_bits(tree_mask: TreeMask, num_columns: int) -> Ints:
    """A bit for each column that a row sees, [rows, columns / 64]. Columns beyond those of the mask are hidden."""
    is_visible = np.zeros((len(tree_mask), num_columns), np.bool_)
    is_visible[:, : tree_mask.shape[1]] = tree_mask == 0.0
    return np.packbits(is_visible, axis=1, bitorder="little").view(np.int64)


class PackedStep(NamedTuple):
    """A step on the device, as views of the array."""

    num_uncommitted: Tensor  # [1]
    prefixes: Tensor  # [padded KV lengths]
    tokens: Tensor  # [n]
    offsets: Tensor  # [n]
    rows: Tensor  # [rows, n]
    column_offsets: Tensor  # [columns], or [0] if no layer has a window
    bits: Tensor  # [n, columns / 64]

    @classmethod
    def of(cls, integers: Tensor, key: GraphKey) -> PackedStep:
        """The views of the array that ``pack`` made for a step with this key."""
        n, num_words = key.num_tokens, key.num_columns // WORD_BITS
        sizes = [1, len(key.kv_lengths), n, n, key.num_rows * n, 0, n * num_words]
        sizes[5] = len(integers) - sum(sizes)
        header, prefixes, tokens, offsets, rows, column_offsets, bits = integers.split(sizes)
        return cls(header, prefixes, tokens, offsets, rows.view(-1, n), column_offsets, bits.view(n, num_words))

    def slots(self, number: int = 0) -> Tensor:
        """Indices in the KV cache at which the tokens are written after prefix ``number``, [n]."""
        first = self.prefixes[number : number + 1] + self.num_uncommitted
        return first + torch.arange(len(self.tokens), device=first.device)

    def paths(self) -> Tensor:
        """The tokens on the path to each token, [n, n]; columns that it does not see repeat the first token."""
        column = torch.arange(len(self.tokens), device=self.bits.device)
        return torch.where(self._sees(column), self.tokens, self.tokens[:1])

    def _sees(self, column: Tensor) -> Tensor:
        """Whether each token sees columns of the tree mask, [n, columns]."""
        return (self.bits[:, column // WORD_BITS] >> (column % WORD_BITS)) & 1 > 0

    def masks(
        self,
        windows: Mapping[str, int | None],
        number: int = 0,
        *,
        padded_kv_length: int,
        mask_value: float,
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """Additive masks [1, 1, n, padded KV length] by layer type after prefix ``number``: the prefix as far as the
        window reaches, the tree mask, and hidden padding.
        """
        num_columns = WORD_BITS * self.bits.shape[1]
        # Column of the tree mask for each cached token: negative in the prefix, too large in the padding.
        column = torch.arange(padded_kv_length, device=self.bits.device) - self.prefixes[number : number + 1]
        inside = column.clamp(0, num_columns - 1)
        is_in_tree = (column == inside) & self._sees(inside)
        is_hidden = ~(is_in_tree | (column < 0))
        masks = {}
        for layer_type, window in windows.items():
            hidden = is_hidden
            if window is not None:
                offsets = torch.where(column < 0, column, self.column_offsets[inside])
                hidden = is_hidden | (offsets <= (self.offsets - window)[:, None])
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            masks[layer_type] = mask.masked_fill_(hidden, mask_value)[None, None]
        return masks
