"""Losses of networks of blocks, over the two readings of each batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from autotune.documents.loss_settings import LossSettings
from autotune.documents.subnet import Subnet
from autotune.drafters.network import BlocksConfig, BlocksNetwork
from autotune.drafters.teacher_batch import TeacherBatch
from autotune.drafters.trainable import Divergence, Metrics, TrainableNetwork, divergence
from autotune.drafters.two_readings import DraftRows, TwoReadings, own_feature_mask, rows_of
from autotune.files import parse_kind
from autotune.modeling.target import Target


class TokenLosses(NamedTuple):
    """Loss and agreement of every loss token of a batch, in both readings."""

    losses: Tensor  # [2, tokens]
    agrees: Tensor  # whether the draft's most probable token is the target's, [2, tokens]
    is_own: Tensor  # tokens that read the draft's own state in the second reading, [tokens]
    example: Tensor  # the example of each token, [tokens]
    early: Tensor  # the stream after the first block in the first reading, [tokens, hidden]


class TrainableBlocks(BlocksNetwork, TrainableNetwork):
    """A network of blocks that is trained on both readings of each batch."""

    config_type: ClassVar[type[BlocksConfig]]
    loss_weights: ClassVar[tuple[float, float]]
    """Weights of the logits' and of the features' loss in the draft's paper."""

    @classmethod
    def new(cls, sizes: Mapping[str, Any], target: Target, *, source: str) -> Self:
        text = target.text.config
        of_target = {"hidden_size": text.hidden_size, "num_target_layers": text.num_hidden_layers}
        content, kinds = {**of_target, **sizes, "kind": cls.kind}, {cls.kind: cls.config_type}
        return cls(parse_kind(content, kinds, key="kind", what="kind of draft", source=source))

    def drawn_subnet(self, settings: LossSettings, generator: torch.Generator) -> tuple[Subnet, list[Tensor] | None]:
        """The subnet of a step, and its head masks if the network is a supernet."""
        return Subnet(visual_keep=self.config.visual_keep), None

    def token_losses(
        self,
        batch: TeacherBatch,
        rows: DraftRows,
        settings: LossSettings,
        head_masks: list[Tensor] | None,
        is_own: Tensor,
        compare: Divergence = divergence,
    ) -> TokenLosses:
        """Read the rows of a batch twice, and compare the draft with the target: the weighted sum of the divergence
        from the target's distribution and of the SmoothL1 loss of the last features.
        """
        logit_weight, feature_weight = (
            weight if given is None else given
            for weight, given in zip(self.loss_weights, (settings.logit_weight, settings.feature_weight), strict=True)
        )
        target_states = batch.hidden[self.config.num_target_layers][batch.loss_mask]
        teacher_logprobs = batch.head(target_states).float().log_softmax(-1)
        early: list[Tensor] = []
        readings = TwoReadings(self, rows, head_masks)
        states = readings.with_target_features(early)
        own_states = readings.with_own_features(states, is_own)
        losses, agrees = [], []
        for draft_states in (states[rows.loss_mask], own_states[readings.is_again]):
            logit_loss, agreement = compare(batch.head(draft_states), teacher_logprobs)
            distance = smooth_l1_loss(draft_states.float(), target_states.float(), reduction="none").mean(-1)
            losses.append(logit_weight * logit_loss + feature_weight * distance)
            agrees.append(agreement)
        example, is_own = rows.loss_mask.nonzero()[:, 0], is_own[rows.loss_mask]
        return TokenLosses(torch.stack(losses), torch.stack(agrees), is_own, example, early[0][rows.loss_mask])

    def loss(
        self, batch: TeacherBatch, settings: LossSettings, generator: torch.Generator, compare: Divergence = divergence
    ) -> tuple[Tensor, Metrics]:
        subnet, head_masks = self.drawn_subnet(settings, generator)
        layer = subnet.injection_layer or self.config.num_target_layers
        noise = generator if self.training else None
        rows = rows_of(self, batch, visual_keep=subnet.visual_keep, injection_layer=layer, generator=noise)
        tokens = self.token_losses(batch, rows, settings, head_masks, own_feature_mask(rows, generator), compare)
        loss, agreement = tokens.losses.mean(), tokens.agrees[0].mean().item()
        metrics = {"agreement": agreement, "own_agreement": tokens.agrees[1][tokens.is_own].mean().item()}
        rule = settings.distillation
        if rule != "none":
            source = rule if isinstance(rule, int) else batch.distilled_layer(rule)
            imitated = batch.hidden[source][batch.loss_mask].float()
            loss = loss + settings.distillation_weight * smooth_l1_loss(tokens.early.float(), imitated)
            metrics["distilled_layer"] = float(source)
        return loss, {"loss": loss.item(), **metrics}
