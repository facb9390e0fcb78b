"""``specvlm``: one block over embeddings fused with the inputs of the target's head, as in EAGLE-2, with normalized
inputs; an elastic compressor shortens the visual tokens (SpecVLM, sections 3.3 and 3.4).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autotune.documents.subnet import Operator
from autotune.drafters.blocks import DraftBlock
from autotune.drafters.compression import CompressionConfig, Compressor
from autotune.drafters.network import BlocksConfig, BlocksNetwork, PromptRows


class SpecVlmConfig(BlocksConfig):
    """Sizes of a SpecVLM draft."""

    kind: str = "specvlm"
    compression: CompressionConfig = CompressionConfig()


class SpecVlmNetwork(BlocksNetwork):
    """One block after a fusion layer and a compressor."""

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
        return [self.only]

    @property
    def operators(self) -> tuple[Operator, ...]:
        return self.config.compression.operators

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        return self.fusion(torch.cat([self.embedding_norm(embeddings), features], -1))  # type: ignore[no-any-return]

    def fix_operator(self, operator: Operator | None, ratio: int | None) -> None:
        self.compressor.fix(operator, ratio)

    def condense(
        self,
        rows: PromptRows,
        question: Tensor,
        generator: torch.Generator | None = None,
        operator: Operator | None = None,
    ) -> PromptRows:
        """Compress the visual rows. A compressed row has no features of a single token; its features are zero."""
        is_text = ~rows.is_visual
        if self.config.compression.gate == "none" or bool(is_text.all()):
            return rows
        question = self.target_features({self.config.num_target_layers: question})
        visual, at = self.compressor(
            rows.stream[rows.is_visual], rows.positions[rows.is_visual], question, generator, operator
        )
        positions = torch.cat([rows.positions[is_text], at])
        order = positions.argsort(stable=True)
        features = torch.cat([rows.features[is_text], rows.features.new_zeros(len(visual), rows.features.shape[1])])
        is_visual = torch.arange(len(positions), device=positions.device) >= int(is_text.sum())
        stream = torch.cat([rows.stream[is_text], visual])
        return PromptRows(stream[order], features[order], positions[order], is_visual[order])
