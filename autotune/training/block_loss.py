"""Training of block-diffusion drafts: blocks begin at many tokens of the answers, and all of their tokens are compared at once.

A block reads the target's features of the tokens before it, its first token, and mask tokens. The weight of the token at
depth d is ``exp(-(d - 1) / gamma)`` as in DFlash (arXiv 2602.06036), because a token counts only if all before it are accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.drafters.blocks import AttentionContext
from autotune.drafters.dflash import DFlashNetwork
from autotune.training.divergence import Divergence, divergence
from autotune.training.teacher import TeacherBatch
from autotune.training.unrolled import UnrolledKeys

BLOCKS = 64  # most blocks of one example in a step, chosen at random
GAMMA = 4.0  # tokens; the value of the authors' training of blocks of 8


def choose_anchors(batch: TeacherBatch, generator: torch.Generator, *, most: int = BLOCKS) -> tuple[Tensor, Tensor]:
    """First tokens of blocks [batch, blocks], ascending, and whether there is such a block: those of padding are not.

    A block may begin at every token of an answer whose following token the target's distribution is known of.
    """
    may_begin = batch.loss_mask.clone()
    may_begin.scatter_(1, batch.loss_start[:, None], False)  # the prompt's last token never begins a block
    order = torch.rand(may_begin.shape, generator=generator).to(may_begin.device).masked_fill(~may_begin, 2.0)
    count = max(1, min(most, int(may_begin.sum(1).max())))
    anchors = order.argsort(1)[:, :count].sort(1).values
    return anchors, may_begin.gather(1, anchors)


def block_mask(anchors: Tensor, num_columns: int, block_size: int) -> Tensor:
    """Whether a token of a block sees each committed token and each token of a block [batch, 1, tokens, columns + tokens]:
    the tokens before its anchor, and its own block.
    """
    of_token = anchors.repeat_interleave(block_size, 1)
    block = torch.arange(of_token.shape[1], device=anchors.device) // block_size
    before = torch.arange(num_columns, device=anchors.device) < of_token[..., None]
    own = (block[:, None] == block).expand(len(anchors), -1, -1)
    return torch.cat([before, own], 2)[:, None]


def block_states(network: DFlashNetwork, batch: TeacherBatch, anchors: Tensor, mask_embedding: Tensor) -> Tensor:
    """States [batch, blocks, block size, hidden] of the blocks that begin at ``anchors`` [batch, blocks]."""
    size, num_columns = network.config.block_size, batch.embeddings.shape[1]
    features = network.target_features({layer: batch.hidden[layer] for layer in network.config.layers})
    first = batch.embeddings.gather(1, anchors[..., None].expand(-1, -1, batch.embeddings.shape[2]))
    masks = mask_embedding.to(first).expand(*anchors.shape, size - 1, -1)
    stream = torch.cat([first[:, :, None], masks], 2).flatten(1, 2)
    offsets = torch.arange(size, device=anchors.device)
    columns = torch.arange(num_columns, device=anchors.device).expand(len(anchors), -1)
    positions = torch.cat([columns, (anchors[..., None] + offsets).flatten(1)], 1)
    factors = torch.stack([network.factors(of_example) for of_example in positions])
    caches = [UnrolledKeys() for _ in network.layers]
    context = AttentionContext(block_mask(anchors, num_columns, size), caches)
    return network(stream, features, factors, context).unflatten(1, (-1, size))  # type: ignore[no-any-return]


def block_loss(
    network: DFlashNetwork,
    batch: TeacherBatch,
    mask_embedding: Tensor,
    generator: torch.Generator,
    *,
    gamma: float = GAMMA,
    compare: Divergence = divergence,
) -> tuple[Tensor, dict[str, float]]:
    """The KL divergence from the target's distributions along the answers, with weights that fall by depth, and figures to
    display.

    ``agreement`` is the share of first tokens of which the draft's most probable one is the target's; ``own_agreement`` the same
    of the later ones.
    """
    anchors, is_block = choose_anchors(batch, generator)
    states = block_states(network, batch, anchors, mask_embedding)
    depths = torch.arange(1, network.config.block_size, device=anchors.device)
    source = anchors[..., None] + depths - 1  # the token after which the target has the distribution of that depth
    inside = source.clamp(max=batch.loss_mask.shape[1] - 1)
    example = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand_as(source)
    is_known = is_block[..., None] & (source == inside) & batch.loss_mask[example, inside]
    row_of = torch.zeros_like(batch.loss_mask, dtype=torch.long)
    row_of[batch.loss_mask] = torch.arange(int(batch.loss_mask.sum()), device=anchors.device)
    teacher = batch.head(batch.hidden[network.config.num_target_layers][batch.loss_mask]).float().log_softmax(-1)
    logits = network.logits(states[:, :, 1:][is_known], batch.head)
    losses, agrees = compare(logits, teacher[row_of[example[is_known], inside[is_known]]])
    depth = depths.expand_as(source)[is_known]
    weights = torch.exp(-(depth - 1) / gamma)
    loss = (weights * losses).sum() / weights.sum()
    is_first = depth == 1
    first, later = agrees[is_first].mean().item(), agrees[~is_first].mean().item()
    return loss, {"loss": loss.item(), "agreement": first, "own_agreement": later}
