"""What drafts that read the target's features are taught: the target's distributions, and its features.

Losses: KL 1.0, features SmoothL1 0.2, intermediate distillation SmoothL1 0.2 (DREAM, section 3.2; STAR, section 3.3).
A draft answers for tokens that it was not shown the true features of, so each batch is read twice: with the target's
features, and then with stretches of the draft's own states in their place, as in a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from autotune.drafters.draft import num_kept
from autotune.drafters.dream import DreamNetwork
from autotune.drafters.star import HEAD_SHARES, VISUAL_KEEPS, StarNetwork, StarSubnet
from autotune.training.recipe import Stage
from autotune.training.teacher import Lesson

STRETCH = 6  # tokens: one true feature, then the draft's own states


@dataclass(frozen=True)
class DraftRows:
    """A lesson as a draft reads it: pruned visual tokens left out, the others at their places. [batch, n] or [batch, n,
    hidden].
    """

    embeddings: Tensor
    features: Tensor
    """The target's, of the token before."""
    places: Tensor
    """Which column of the lesson each row is."""
    is_taught: Tensor


def rows_of(network: DreamNetwork, lesson: Lesson, *, visual_keep: float, injection_layer: int) -> DraftRows:
    """The rows of a lesson for one subnet."""
    batch = len(lesson.is_token)
    is_kept = lesson.is_token.clone()
    for row, scores in lesson.visual_scores.items():
        number = num_kept(visual_keep, len(scores))
        if number < len(scores):
            places = lesson.is_visual[row].nonzero().squeeze(1)
            is_kept[row, places] = False
            is_kept[row, places[scores.topk(number).indices]] = True
    width = int(is_kept.sum(1).max())
    # What is kept in its order, padding behind.
    order = torch.where(is_kept, 0, 1).argsort(dim=1, stable=True)[:, :width]
    is_row = is_kept.gather(1, order)
    before = network.target_features(lesson.hidden[injection_layer][:, :-1], injection_layer)
    features = torch.cat([network.first_feature.expand(batch, 1, -1), before], 1)
    wide = order.unsqueeze(-1).expand(-1, -1, lesson.embeddings.shape[2])
    return DraftRows(
        embeddings=lesson.embeddings.gather(1, wide),
        features=features.gather(1, wide),
        places=order,
        is_taught=lesson.is_taught.gather(1, order) & is_row,
    )


def own_stretches(rows: DraftRows, generator: torch.Generator) -> Tensor:
    """Rows that read the draft's own state of the row before, [batch, n]: all answer tokens but the first of each
    stretch, which begin at a random place.
    """
    offset = torch.randint(STRETCH, (len(rows.places), 1), generator=generator).to(rows.places.device)
    follows = torch.zeros_like(rows.is_taught)
    follows[:, 1:] = rows.is_taught[:, :-1] & rows.is_taught[:, 1:]
    return follows & ((rows.places + offset) % STRETCH != 0)


def sampled_subnet(network: StarNetwork, generator: torch.Generator) -> StarSubnet:
    """A subnet at random, each block's heads by themselves (STAR, algorithm 1)."""

    def one_of(number: int) -> int:
        return int(torch.randint(number, (), generator=generator))

    return StarSubnet(
        heads=tuple(HEAD_SHARES[one_of(len(HEAD_SHARES))] for _ in range(3)),  # type: ignore[arg-type]
        visual_keep=VISUAL_KEEPS[one_of(len(VISUAL_KEEPS))],
        injection_layer=network.config.injection_layers[one_of(len(network.config.injection_layers))],
    )


def drafting_loss(
    network: DreamNetwork,
    lesson: Lesson,
    stage: Stage,
    subnet: StarSubnet,
    head_masks: list[Tensor] | None,
    generator: torch.Generator,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one lesson for one subnet, and figures to show: how often it says what the target says, behind true
    features (``agreement``) and behind states of its own.
    """
    layer = subnet.injection_layer or network.config.num_target_layers
    rows = rows_of(network, lesson, visual_keep=subnet.visual_keep, injection_layer=layer)
    factors = network.factors(rows.places)
    truth = lesson.hidden[network.config.num_target_layers][lesson.is_taught]
    taught = lesson.head(truth).float().log_softmax(-1)
    early: list[Tensor] = []
    is_own = own_stretches(rows, generator)
    is_scored = torch.ones_like(truth[:, 0], dtype=torch.bool), is_own[rows.is_taught]
    states = network(rows.embeddings, rows.features, factors, head_masks=head_masks, early=early)
    losses, figures = [], {}
    for number in range(2):
        if number == 1:
            own = network.own_features(torch.cat([states[:, :1], states[:, :-1]], 1))
            features = torch.where(is_own.unsqueeze(-1), own, rows.features)
            states = network(rows.embeddings, features, factors, head_masks=head_masks)
        said = states[rows.is_taught]
        logits = lesson.head(said).float().log_softmax(-1)
        losses.append(
            functional.kl_div(logits, taught, reduction="batchmean", log_target=True)
            + stage.feature_weight * functional.smooth_l1_loss(said.float(), truth.float())
        )
        agrees = logits.argmax(-1) == taught.argmax(-1)
        figures["agreement" if number == 0 else "own_agreement"] = agrees[is_scored[number]].float().mean().item()
    loss = torch.stack(losses).mean()
    if stage.distillation != "none":
        source = lesson.distilled_layer(stage.distillation)
        wanted = lesson.hidden[source][lesson.is_taught].float()
        loss = loss + stage.distillation_weight * functional.smooth_l1_loss(early[0][rows.is_taught].float(), wanted)
        figures["distilled_layer"] = float(source)
    return loss, {"loss": loss.item(), **figures}
