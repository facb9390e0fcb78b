"""``dream``: an initial block, a cross-attention block over the target's features, a final block (DREAM, section 3.1).

Embedding and head are the target's. Attention and MLP of a block run in parallel (``blocks.py``), the paper's one after
the other; and a block adds its output to the stream, where the paper's fused features replace those of the first layer.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autotune.drafters.block_network import BlocksConfig, BlocksNetwork
from autotune.drafters.blocks import DraftBlock

BlockName = Literal["initial", "crossing", "second_crossing", "final"]
SELF_CROSS_SELF: tuple[BlockName, ...] = ("initial", "crossing", "final")


class DreamConfig(BlocksConfig):
    kind: str = "dream"
    blocks: tuple[BlockName, ...] = Field(default=SELF_CROSS_SELF, min_length=1, strict=False)
    """Blocks in execution order. Others than the three of the paper are for its ablations (DREAM, table 2)."""
    visual_keep: float = Field(default=0.75, gt=0, le=1)


class DreamNetwork(BlocksNetwork):
    """Three blocks, of which the second attends to the target's features of all tokens of the prompt."""

    kind = "dream"
    config_type = DreamConfig
    loss_weights = (1.0, 0.2)  # DREAM, section 4
    config: DreamConfig

    def __init__(self, config: DreamConfig) -> None:
        super().__init__(config)
        for name in config.blocks:
            self.add_module(name, self.new_block(has_cross_attention="crossing" in name))

    @property
    def blocks(self) -> list[DraftBlock]:
        return [getattr(self, name) for name in self.config.blocks]
