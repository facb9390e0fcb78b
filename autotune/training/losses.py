"""Losses of drafts that read the target's features.

Weights: KL 1.0, features SmoothL1 0.2, intermediate distillation SmoothL1 0.2 (DREAM, section 3.2; STAR, section 3.3).
Inside a tree a draft reads its own states in place of the target's features. Each batch is therefore read twice: with the
target's features, and with runs of the draft's own states in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.documents.subnet import Subnet
from autotune.drafters.draft import kept_tokens
from autotune.drafters.network import BlocksNetwork, PromptRows
from autotune.drafters.star import HEAD_SHARES, VISUAL_KEEPS, StarNetwork
from autotune.training.recipe import Stage
from autotune.training.teacher import TeacherBatch

OWN_FEATURE_RUN = 6  # tokens: one feature of the target, then the draft's own states


@dataclass(frozen=True)
class DraftRows:
    """A teacher batch as a draft reads it, with visual tokens pruned and condensed: [batch, n] or [batch, n, hidden]."""

    embeddings: Tensor
    """Embeddings of the tokens at ``positions``."""
    stream: Tensor
    """Input of the first block."""
    features: Tensor
    """The target's features of the token before."""
    positions: Tensor
    """The column of the teacher batch that each row comes from."""
    loss_mask: Tensor


def rows_of(
    network: BlocksNetwork,
    batch: TeacherBatch,
    *,
    visual_keep: float,
    injection_layer: int,
    generator: torch.Generator | None = None,
) -> DraftRows:
    """The rows of a teacher batch for one subnet. ``generator`` makes the noise of trained gates."""
    num_rows = len(batch.lengths)
    before = network.target_features({injection_layer: batch.hidden[injection_layer][:, :-1]})
    features = torch.cat([network.first_feature.expand(num_rows, 1, -1), before], 1)
    stream = network.fuse(batch.embeddings, features)
    condensed = []
    for row, length in enumerate(batch.lengths.tolist()):
        is_visual = batch.is_visual[row, :length]
        kept = kept_tokens(is_visual, batch.visual_scores.get(row), visual_keep)
        if kept is None:
            kept = torch.arange(length, device=is_visual.device)
        rows = PromptRows(stream[row, kept], features[row, kept], kept, is_visual[kept])
        question = batch.hidden[injection_layer][row, batch.loss_start[row]]
        condensed.append(network.condense(rows, question, generator))
    padded = [nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*condensed, strict=True)]
    stream, features, positions, _ = padded
    is_row = torch.arange(positions.shape[1]) < torch.tensor([len(rows.positions) for rows in condensed])[:, None]
    wide = positions.unsqueeze(-1).expand(-1, -1, batch.embeddings.shape[2])
    return DraftRows(
        embeddings=batch.embeddings.gather(1, wide),
        stream=stream,
        features=features,
        positions=positions,
        loss_mask=batch.loss_mask.gather(1, positions) & is_row.to(positions.device),
    )


def own_feature_mask(rows: DraftRows, generator: torch.Generator) -> Tensor:
    """Rows that read the draft's own state of the row before [batch, n]: all answer tokens except the first of each run of
    OWN_FEATURE_RUN tokens. Runs begin at a random offset.
    """
    offset = torch.randint(OWN_FEATURE_RUN, (len(rows.positions), 1), generator=generator).to(rows.positions.device)
    follows = torch.zeros_like(rows.loss_mask)
    follows[:, 1:] = rows.loss_mask[:, :-1] & rows.loss_mask[:, 1:]
    return follows & ((rows.positions + offset) % OWN_FEATURE_RUN != 0)


def sample_subnet(network: StarNetwork, generator: torch.Generator) -> Subnet:
    """A random subnet; the heads of each block are drawn independently (STAR, algorithm 1)."""

    def choice(values: Sequence[float]) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    return Subnet(
        heads=(choice(HEAD_SHARES), choice(HEAD_SHARES), choice(HEAD_SHARES)),
        visual_keep=choice(VISUAL_KEEPS),
        injection_layer=choice(network.config.injection_layers),
    )


def drafting_loss(
    network: BlocksNetwork,
    batch: TeacherBatch,
    stage: Stage,
    subnet: Subnet,
    head_masks: list[Tensor] | None,
    generator: torch.Generator,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one teacher batch for one subnet, and figures to display.

    ``agreement`` is the share of tokens on which the draft's most probable token is the target's, given the target's
    features; ``own_agreement`` the same given the draft's own states.
    """
    layer = subnet.injection_layer or network.config.num_target_layers
    noise = generator if network.training else None
    rows = rows_of(network, batch, visual_keep=subnet.visual_keep, injection_layer=layer, generator=noise)
    factors = network.factors(rows.positions)
    target_states = batch.hidden[network.config.num_target_layers][batch.loss_mask]
    teacher_logprobs = batch.head(target_states).float().log_softmax(-1)
    early: list[Tensor] = []
    is_own = own_feature_mask(rows, generator)
    is_scored = torch.ones_like(target_states[:, 0], dtype=torch.bool), is_own[rows.loss_mask]
    states = network(rows.stream, rows.features, factors, head_masks=head_masks, early=early)
    losses, figures = [], {}
    for number in range(2):
        if number == 1:
            own = network.own_features(torch.cat([states[:, :1], states[:, :-1]], 1))
            features = torch.where(is_own.unsqueeze(-1), own, rows.features)
            stream = torch.where(is_own.unsqueeze(-1), network.fuse(rows.embeddings, own), rows.stream)
            states = network(stream, features, factors, head_masks=head_masks)
        draft_states = states[rows.loss_mask]
        logits = batch.head(draft_states).float().log_softmax(-1)
        losses.append(
            stage.logit_weight * functional.kl_div(logits, teacher_logprobs, reduction="batchmean", log_target=True)
            + stage.feature_weight * functional.smooth_l1_loss(draft_states.float(), target_states.float())
        )
        agrees = logits.argmax(-1) == teacher_logprobs.argmax(-1)
        figures["agreement" if number == 0 else "own_agreement"] = agrees[is_scored[number]].float().mean().item()
    loss = torch.stack(losses).mean()
    if stage.distillation != "none":
        source = batch.distilled_layer(stage.distillation)
        imitated = batch.hidden[source][batch.loss_mask].float()
        loss = loss + stage.distillation_weight * functional.smooth_l1_loss(early[0][rows.loss_mask].float(), imitated)
        figures["distilled_layer"] = float(source)
    return loss, {"loss": loss.item(), **figures}
