"""``dream``: an initial block, a cross-attention block over the target's features, a final block (DREAM, section 3.1).

Embedding and head are the target's. Unlike the paper's sequential decoder layers, attention and MLP of a block run in
parallel (``blocks.py``).
"""

from __future__ import annotations

from pydantic import Field

from autotune.drafters.blocks import DraftBlock
from autotune.drafters.network import BlocksConfig, BlocksNetwork


class DreamConfig(BlocksConfig):
    """Sizes of a DREAM draft."""

    kind: str = "dream"
    crosses: bool = True
    """False leaves the middle block out, for an ablation (DREAM, figure 5)."""
    visual_keep: float = Field(default=0.75, gt=0, le=1)


class DreamNetwork(BlocksNetwork):
    """Three blocks; the middle one reads the features."""

    config: DreamConfig

    def __init__(self, config: DreamConfig) -> None:
        super().__init__(config)
        self.initial = self.new_block()
        self.crossing = self.new_block(crosses=True) if config.crosses else None
        self.final = self.new_block()

    @property
    def blocks(self) -> list[DraftBlock]:
        return [block for block in (self.initial, self.crossing, self.final) if block is not None]
