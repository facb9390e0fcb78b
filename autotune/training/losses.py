"""What drafts that read the target's features are taught: the target's distributions, and its features.

Losses: KL 1.0, features SmoothL1 0.2, intermediate distillation SmoothL1 0.2 (DREAM, section 3.2; STAR, section 3.3).
A draft answers for tokens that it was not shown the true features of, so each batch is read twice: with the target's
features, and then with stretches of the draft's own states in their place, as in a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.documents.subnet import Subnet
from autotune.drafters.draft import kept_tokens
from autotune.drafters.network import BlocksNetwork, PromptRows
from autotune.drafters.star import HEAD_SHARES, VISUAL_KEEPS, StarNetwork
from autotune.training.recipe import Stage
from autotune.training.teacher import TeacherBatch

STRETCH = 6  # tokens: one true feature, then the draft's own states


@dataclass(frozen=True)
class DraftRows:
    """A lesson as a draft reads it: visual tokens pruned and condensed, all at their places. [batch, n] or [batch, n,
    hidden].
    """

    embeddings: Tensor
    """Of the tokens at the rows' places."""
    stream: Tensor
    """What enters the first block."""
    features: Tensor
    """The target's, of the token before."""
    positions: Tensor
    """Which column of the lesson each row is."""
    loss_mask: Tensor


def rows_of(
    network: BlocksNetwork,
    lesson: TeacherBatch,
    *,
    visual_keep: float,
    injection_layer: int,
    generator: torch.Generator | None = None,
) -> DraftRows:
    """The rows of a lesson for one subnet. ``generator`` makes the noise of gates that are trained."""
    batch = len(lesson.lengths)
    before = network.target_features({injection_layer: lesson.hidden[injection_layer][:, :-1]})
    features = torch.cat([network.first_feature.expand(batch, 1, -1), before], 1)
    stream = network.fuse(lesson.embeddings, features)
    found = []
    for row, length in enumerate(lesson.lengths.tolist()):
        is_visual = lesson.is_visual[row, :length]
        kept = kept_tokens(is_visual, lesson.visual_scores.get(row), visual_keep)
        if kept is None:
            kept = torch.arange(length, device=is_visual.device)
        rows = PromptRows(stream[row, kept], features[row, kept], kept, is_visual[kept])
        question = lesson.hidden[injection_layer][row, lesson.first_taught[row]]
        found.append(network.condense(rows, question, generator))
    padded = [nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*found, strict=True)]
    stream, features, positions, _ = padded
    is_row = torch.arange(positions.shape[1]) < torch.tensor([len(one.positions) for one in found])[:, None]
    wide = positions.unsqueeze(-1).expand(-1, -1, lesson.embeddings.shape[2])
    return DraftRows(
        embeddings=lesson.embeddings.gather(1, wide),
        stream=stream,
        features=features,
        positions=positions,
        loss_mask=lesson.loss_mask.gather(1, positions) & is_row.to(positions.device),
    )


def own_stretches(rows: DraftRows, generator: torch.Generator) -> Tensor:
    """Rows that read the draft's own state of the row before, [batch, n]: all answer tokens but the first of each
    stretch, which begin at a random place.
    """
    offset = torch.randint(STRETCH, (len(rows.positions), 1), generator=generator).to(rows.positions.device)
    follows = torch.zeros_like(rows.loss_mask)
    follows[:, 1:] = rows.loss_mask[:, :-1] & rows.loss_mask[:, 1:]
    return follows & ((rows.positions + offset) % STRETCH != 0)


def sampled_subnet(network: StarNetwork, generator: torch.Generator) -> Subnet:
    """A subnet at random, each block's heads by themselves (STAR, algorithm 1)."""

    def one_of(number: int) -> int:
        return int(torch.randint(number, (), generator=generator))

    return Subnet(
        heads=tuple(HEAD_SHARES[one_of(len(HEAD_SHARES))] for _ in range(3)),  # type: ignore[arg-type]
        visual_keep=VISUAL_KEEPS[one_of(len(VISUAL_KEEPS))],
        injection_layer=network.config.injection_layers[one_of(len(network.config.injection_layers))],
    )


def drafting_loss(
    network: BlocksNetwork,
    lesson: TeacherBatch,
    stage: Stage,
    subnet: Subnet,
    head_masks: list[Tensor] | None,
    generator: torch.Generator,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one lesson for one subnet, and figures to show: how often it says what the target says, behind true
    features (``agreement``) and behind states of its own.
    """
    layer = subnet.injection_layer or network.config.num_target_layers
    noise = generator if network.training else None
    rows = rows_of(network, lesson, visual_keep=subnet.visual_keep, injection_layer=layer, generator=noise)
    factors = network.factors(rows.positions)
    truth = lesson.hidden[network.config.num_target_layers][lesson.loss_mask]
    taught = lesson.head(truth).float().log_softmax(-1)
    early: list[Tensor] = []
    is_own = own_stretches(rows, generator)
    is_scored = torch.ones_like(truth[:, 0], dtype=torch.bool), is_own[rows.loss_mask]
    states = network(rows.stream, rows.features, factors, head_masks=head_masks, early=early)
    losses, figures = [], {}
    for number in range(2):
        if number == 1:
            own = network.own_features(torch.cat([states[:, :1], states[:, :-1]], 1))
            features = torch.where(is_own.unsqueeze(-1), own, rows.features)
            stream = torch.where(is_own.unsqueeze(-1), network.fuse(rows.embeddings, own), rows.stream)
            states = network(stream, features, factors, head_masks=head_masks)
        said = states[rows.loss_mask]
        logits = lesson.head(said).float().log_softmax(-1)
        losses.append(
            stage.logit_weight * functional.kl_div(logits, taught, reduction="batchmean", log_target=True)
            + stage.feature_weight * functional.smooth_l1_loss(said.float(), truth.float())
        )
        agrees = logits.argmax(-1) == taught.argmax(-1)
        figures["agreement" if number == 0 else "own_agreement"] = agrees[is_scored[number]].float().mean().item()
    loss = torch.stack(losses).mean()
    if stage.distillation != "none":
        source = lesson.distilled_layer(stage.distillation)
        wanted = lesson.hidden[source][lesson.loss_mask].float()
        loss = loss + stage.distillation_weight * functional.smooth_l1_loss(early[0][rows.loss_mask].float(), wanted)
        figures["distilled_layer"] = float(source)
    return loss, {"loss": loss.item(), **figures}
