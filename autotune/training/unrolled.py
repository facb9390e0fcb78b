"""Training of EAGLE-3 heads: drafting is unrolled for a few tokens at every position (training-time test, EAGLE-3, arXiv 2503.01840).

In step 0 every row reads the target's features of the token before. In step k, row i reads the state that step k - 1 gave
row i - 1, and attends to what it would have in its cache: keys of step 0 up to row i - k, the last that read the target,
and one key of every later step, of rows i - k + 1 to i.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from autotune.drafters.blocks import AttentionContext
from autotune.drafters.eagle3 import Eagle3Network
from autotune.modeling.graph_runner import KVSlots
from autotune.training.divergence import Divergence, divergence
from autotune.training.teacher import TeacherBatch

NUM_STEPS = 6
STEP_WEIGHT = 0.8  # of the loss of a step, relative to the step before


class UnrolledKeys:
    """The keys and values of all steps so far, one step behind the other (``KeysValues``)."""

    def __init__(self) -> None:
        self._all: Tensor | None = None

    def write(self, keys_values: Tensor, begin: int | KVSlots) -> tuple[Tensor, Tensor]:
        """See ``KeysValues``."""
        self._all = keys_values if self._all is None else torch.cat([self._all, keys_values], 3)
        keys, values = self._all.unbind(2)
        return keys, values


def unrolled_mask(num_rows: int, step: int) -> Tensor:
    """Whether row i of a step attends to column (step j, row) [1, 1, num_rows, (step + 1) * num_rows]; every row sees itself."""
    rows = torch.arange(num_rows)[:, None]
    columns = torch.arange(num_rows)
    of_steps = [columns <= rows - step, *(columns == rows - step + earlier for earlier in range(1, step + 1))]
    return torch.cat(of_steps, 1)[None, None]


def unrolled_states(network: Eagle3Network, stream: Tensor, features: Tensor, num_steps: int) -> Iterator[Tensor]:
    """States [batch, n, state size] of every step, for embeddings ``stream`` and the target's ``features``, [batch, n, ...] each.
    In step k, those of the first k rows mean nothing, because there is nothing before them to be drafted from.
    """
    rows = torch.arange(stream.shape[1], device=stream.device)
    factors, cache = network.factors(rows)[None], UnrolledKeys()
    for step in range(num_steps):
        context = AttentionContext(unrolled_mask(len(rows), step).to(stream.device), (cache,))
        states = network(stream, features, factors, context)
        yield states
        features = torch.cat([features[:, :1], network.own_features(states)[:, :-1]], 1)


def unrolled_loss(
    network: Eagle3Network, batch: TeacherBatch, *, num_steps: int = NUM_STEPS, compare: Divergence = divergence
) -> tuple[Tensor, dict[str, float]]:
    """The KL divergence from the target's distribution, averaged over the steps with falling weights, and figures to display.

    ``agreement`` is the share of tokens on which the head's most probable token is the target's, given the target's features;
    ``own_agreement`` the same in the later steps.
    """
    hidden, last = batch.hidden, network.config.num_target_layers
    features = network.target_features({layer: hidden[layer][:, :-1] for layer in network.config.layers})
    stream, is_loss = batch.embeddings[:, 1:], batch.loss_mask[:, 1:]  # sequences without their first token
    teacher_logprobs = batch.head(hidden[last][:, 1:][is_loss]).float().log_softmax(-1)
    row = is_loss.nonzero()[:, 1]
    losses, agreements = [], []
    for step, states in enumerate(unrolled_states(network, stream, features, num_steps)):
        is_drafted = row >= step
        token_losses, agrees = compare(network.logits(states[is_loss], batch.head), teacher_logprobs)
        losses.append(token_losses[is_drafted].mean())
        agreements.append(agrees[is_drafted].mean().item())
    weights = torch.tensor([STEP_WEIGHT**step for step in range(num_steps)], device=stream.device)
    loss = (torch.stack(losses) * weights).sum() / weights.sum()
    later = agreements[1:] or agreements
    figures = {"loss": loss.item(), "agreement": agreements[0], "own_agreement": sum(later) / len(later)}
    return loss, figures
