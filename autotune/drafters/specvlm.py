"""``specvlm``: one block over embeddings fused with the features that the target's head reads, as in EAGLE-2, with normed
inputs; visual tokens go through an elastic compressor (SpecVLM, sections 3.3 and 3.4).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autotune.drafters.blocks import DraftBlock
from autotune.drafters.compression import CompressionConfig, Compressor
from autotune.drafters.network import BlocksConfig, BlocksNetwork, PromptRows


class SpecVlmConfig(BlocksConfig):
    """The sizes of a draft."""

    kind: str = "specvlm"
    compression: CompressionConfig = CompressionConfig()


class SpecVlmNetwork(BlocksNetwork):
    """One block."""

    config: SpecVlmConfig

    def __init__(self, config: SpecVlmConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.embedding_norm = nn.LayerNorm(hidden, bias=False)
        self.fusion = nn.Linear(2 * hidden, hidden, bias=False)
        self.compressor = Compressor(config.compression, hidden)
        self.only = self.new_block()

    @property
    def blocks(self) -> list[DraftBlock]:
        """In the order in which they run."""
        return [self.only]

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The stream that enters the block, [..., hidden]."""
        return self.fusion(torch.cat([self.embedding_norm(embeddings), features], -1))  # type: ignore[no-any-return]

    def condense(self, rows: PromptRows, question: Tensor, generator: torch.Generator | None = None) -> PromptRows:
        """Through the compressor (see ``DraftNetwork``). Condensed rows have no feature of one token: theirs are zero."""
        is_text = ~rows.is_visual
        if self.config.compression.gate == "none" or bool(is_text.all()):
            return rows
        asked = self.target_features({self.config.num_target_layers: question})
        made, at = self.compressor(rows.stream[rows.is_visual], rows.positions[rows.is_visual], asked, generator)
        positions = torch.cat([rows.positions[is_text], at])
        order = positions.argsort(stable=True)
        features = torch.cat([rows.features[is_text], rows.features.new_zeros(len(made), rows.features.shape[1])])
        is_visual = torch.arange(len(positions), device=positions.device) >= int(is_text.sum())
        stream = torch.cat([rows.stream[is_text], made])
        return PromptRows(stream[order], features[order], positions[order], is_visual[order])
