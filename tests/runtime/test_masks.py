"""The mask buffer against a mask written anew."""

from __future__ import annotations

import numpy as np
import torch

from autotune.runtime.masks import MaskBuffer


def test_a_view_is_open_over_the_prefix_and_the_block_behind_it() -> None:
    """Blocks of all sizes at prefixes that grow and, with a new request, start again: what earlier blocks closed must
    be open where it is prefix now.
    """
    rng = np.random.default_rng(0)
    masks = MaskBuffer(200, dtype=torch.float32, device=torch.device("cpu"))
    prefix = 0
    for turn in range(60):
        if turn % 20 == 0:
            prefix = int(rng.integers(5))
        rows, columns = int(rng.integers(1, 40)), int(rng.integers(1, 40))
        block = np.where(rng.random((rows, columns)) < 0.5, np.float32(masks.closed), np.float32(0))
        expected = np.concatenate([np.zeros((rows, prefix), np.float32), block], 1)
        assert np.array_equal(masks.write(block, prefix)[0, 0].numpy(), expected)
        prefix += int(rng.integers(1, 10))
