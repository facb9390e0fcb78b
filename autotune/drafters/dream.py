"""``dream``: an initial block, a cross-attention block over features of the target, a final block (DREAM, section 3.1).

The draft reads the target's embeddings and answers through the target's head, so it has only its blocks. They are not
the paper's sequential decoder layers, but attention and MLP side by side (``blocks.py``).
"""

from __future__ import annotations

from pydantic import Field

from autotune.drafters.blocks import DraftBlock
from autotune.drafters.network import BlocksConfig, BlocksNetwork


class DreamConfig(BlocksConfig):
    """The sizes of a draft."""

    kind: str = "dream"
    crosses: bool = True
    """Without it the middle block is left out: an ablation (DREAM, figure 5)."""
    visual_keep: float = Field(default=0.75, gt=0, le=1)


class DreamNetwork(BlocksNetwork):
    """Three blocks, the middle one of which reads the features."""

    config: DreamConfig

    def __init__(self, config: DreamConfig) -> None:
        super().__init__(config)
        self.initial = self.new_block()
        self.crossing = self.new_block(crosses=True) if config.crosses else None
        self.final = self.new_block()

    @property
    def blocks(self) -> list[DraftBlock]:
        """In the order in which they run."""
        return [block for block in (self.initial, self.crossing, self.final) if block is not None]
