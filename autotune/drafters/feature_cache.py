"""The KV cache of a draft that reads the target's features."""

from __future__ import annotations

import torch

from autotune.drafters.network import DraftNetwork


class FeatureCache:
    """Keys and values of all blocks. ``length`` counts committed tokens only: nodes are evaluated with the draft's own
    features, and evaluated again with the target's once they are accepted.

    A cross-attention block also holds the tokens of the prompt that were pruned: its slot of a token is that of the
    other blocks plus their number. All blocks have the capacity of a prompt without pruning.
    """

    def __init__(self, network: DraftNetwork, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.length = 0
        self.blocks = network.new_caches(capacity, dtype=dtype, device=device)

    @property
    def memory_bytes(self) -> int:
        return sum(block.slab.numel() * block.slab.element_size() for block in self.blocks)

    def clear(self) -> None:
        """Drop all tokens; the memory is kept for the next request."""
        self.length = 0

    def release(self) -> None:
        """Free the memory. The cache holds no tokens from here on."""
        self.length = self.capacity = 0
        self.blocks.clear()
