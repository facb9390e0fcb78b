"""``specvlm``: one block over embeddings fused with the inputs of the target's head, as in EAGLE-2, with normalized
inputs; an elastic compressor shortens the visual tokens (SpecVLM, sections 3.3 and 3.4). Unlike the paper's decoder
layer, attention and MLP of the block run in parallel (``blocks.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from autotune.documents.loss_settings import LossSettings
from autotune.documents.subnet import Operator
from autotune.drafters.block_network import BlocksConfig, BlocksNetwork, own_feature_mask, rows_of
from autotune.drafters.blocks import DraftBlock
from autotune.drafters.compression import CompressionConfig, Compressor
from autotune.drafters.network import PromptRows
from autotune.drafters.teacher_batch import Divergence, Metrics, TeacherBatch, divergence


class SpecVlmConfig(BlocksConfig):
    kind: str = "specvlm"
    compression: CompressionConfig = CompressionConfig()


class OperatorLosses(NamedTuple):
    """Every example with each operator of the compressor, as in decoding: [examples, operators]."""

    losses: Tensor  # mean over the loss tokens and both readings
    agreement: Tensor  # share of the loss tokens on which draft and target agree, in the first reading
    shares: Tensor  # rows that the operator leaves, as a share of the visual tokens


class SpecVlmNetwork(BlocksNetwork):
    """One block after a fusion layer and a compressor, whose gate learns from the losses of all operators."""

    kind = "specvlm"
    config_type = SpecVlmConfig
    loss_weights = (0.1, 1.0)  # SpecVLM, eq. 3
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

    def loss(
        self, batch: TeacherBatch, settings: LossSettings, generator: torch.Generator, compare: Divergence = divergence
    ) -> tuple[Tensor, Metrics]:
        """In training, the loss includes that of a selecting gate, which has gradients for the gate alone."""
        loss, metrics = super().loss(batch, settings, generator, compare)
        if self.training and self.config.compression.gate == "select":
            learned = self.gate_loss(batch, settings, generator)
            if learned is not None:
                loss, metrics = loss + learned[0], metrics | learned[1]
        return loss, metrics

    def gate_loss(
        self, batch: TeacherBatch, settings: LossSettings, generator: torch.Generator
    ) -> tuple[Tensor, Metrics] | None:
        """The loss of the compressor's gate on a few examples with images, and metrics; None without such examples.

        The cost of an operator is its loss, relative to the mean over all operators and examples, plus ``gate_cost``
        times the share of visual rows that it leaves.
        """
        with_image = batch.is_visual.any(1).nonzero()[:, 0].cpu()
        drawn = with_image[torch.randperm(len(with_image), generator=generator)][: settings.gate_examples].tolist()
        if not drawn:
            return None
        examples, layer = batch.select(drawn), self.config.num_target_layers
        measured = self.operator_losses(examples, settings, generator)
        costs = measured.losses / measured.losses.mean() + settings.gate_cost * measured.shares
        states = examples.hidden[layer][torch.arange(len(drawn)), examples.loss_start]
        questions = self.target_features({layer: states}).detach()
        chosen = self.compressor.scores(questions).argmax(-1, keepdim=True)
        regret = (costs.gather(1, chosen)[:, 0] - costs.min(1).values).mean()
        return self.compressor.expected_cost(questions, costs, settings.gate_entropy), {"gate_regret": regret.item()}

    @torch.no_grad()
    def operator_losses(
        self, batch: TeacherBatch, settings: LossSettings, generator: torch.Generator
    ) -> OperatorLosses:
        operators = self.config.compression.operators
        count, copies = len(batch.lengths), len(operators)
        repeated = batch.select([row for row in range(count) for _ in operators])
        keep, layer = self.config.visual_keep, self.config.num_target_layers
        rows = rows_of(self, repeated, visual_keep=keep, injection_layer=layer, operators=[*operators] * count)
        is_own = own_feature_mask(rows, generator, copies=copies)
        tokens = self.token_losses(repeated, rows, settings, None, is_own)
        num_tokens, num_visual = repeated.loss_mask.sum(1), repeated.is_visual.sum(1)

        def mean(values: Tensor) -> Tensor:
            sums = values.new_zeros(count * copies).index_add(0, tokens.example, values)
            return (sums / num_tokens).view(count, copies)

        shares = (rows.num_rows - (repeated.lengths - num_visual)) / num_visual.clamp(min=1)
        return OperatorLosses(mean(tokens.losses.mean(0)), mean(tokens.agrees[0]), shares.view(count, copies))
