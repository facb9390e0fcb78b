"""The mask buffer against masks built from scratch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autotune.modeling.masks import TreeMasks, first_visible


@pytest.mark.parametrize("window", [1, 3, 8, 30])
@pytest.mark.parametrize("has_full_layers", [True, False])
def test_a_window_is_measured_in_positions(window: int, has_full_layers: bool) -> None:
    """Siblings have one position: the number of tokens before a token in its own branch decides what it sees. Columns
    that no token sees are left out.
    """
    rng = np.random.default_rng(window)
    windows = {"full_attention": None} if has_full_layers else {}
    masks = TreeMasks({**windows, "sliding_attention": window}, dtype=torch.float32, device=torch.device("cpu"))
    prefix = 0
    for _ in range(60):
        num_columns = int(rng.integers(1, 40))
        rows = np.sort(rng.choice(num_columns, int(rng.integers(1, num_columns + 1)), replace=False))
        column_offsets = np.sort(rng.integers(0, 12, num_columns))
        is_visible = rng.random((len(rows), num_columns)) < 0.5
        tree_mask = np.where(is_visible, np.float32(0), np.float32(masks.mask_value))
        written = masks.write(tree_mask, prefix, column_offsets[rows], column_offsets)
        assert isinstance(written, dict) == has_full_layers
        mask = written["sliding_attention"] if isinstance(written, dict) else written
        if isinstance(written, dict):
            full = written["full_attention"][0, 0].numpy()
            assert np.array_equal(full, np.concatenate([np.zeros((len(rows), prefix), np.float32), tree_mask], 1))
        first = first_visible(prefix, window)
        for row, offset in enumerate(column_offsets[rows]):
            for column in range(first, prefix + num_columns):
                column_offset = column - prefix if column < prefix else column_offsets[column - prefix]
                sees = column_offset > offset - window and (column < prefix or is_visible[row, column - prefix])
                assert mask[0, 0, row, column - first] == (0.0 if sees else masks.mask_value)
        assert mask.shape[3] == prefix - first + num_columns
        prefix = (prefix + int(rng.integers(1, 12))) % 90
