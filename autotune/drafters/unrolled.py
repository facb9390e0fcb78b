"""Training of EAGLE-3 and multi-token prediction heads: drafting is unrolled for a few tokens at every position
(training-time test, EAGLE-3, arXiv 2503.01840).

In step 0 every row reads the target's features of the token before. In step k, row i reads the state that step k - 1
gave row i - 1, and attends to what it would have in its cache: keys of step 0 up to row i - k, the last that read the
target, and one key of every later step, of rows i - k + 1 to i.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from autotune.documents.loss_settings import LossSettings
from autotune.drafters.blocks import AttentionContext
from autotune.drafters.network import DraftNetwork
from autotune.drafters.teacher_batch import Divergence, Metrics, TeacherBatch, divergence

STEP_WEIGHT = 0.8  # of the loss of a step, relative to the step before


class UnrolledKeys:
    """The keys and values of all steps so far, one step behind the other (``KeysValues``)."""

    def __init__(self) -> None:
        self._all: Tensor | None = None

    def write(self, keys_values: Tensor, begin: int | Tensor) -> tuple[Tensor, Tensor]:
        self._all = keys_values if self._all is None else torch.cat([self._all, keys_values], 3)
        keys, values = self._all.unbind(2)
        return keys, values


def unrolled_mask(num_rows: int, step: int, first: int = 0) -> Tensor:
    """Whether row i of a step attends to column (step j, row) [1, 1, rows, columns]; every row sees itself. All steps
    but 0 have the rows from ``first`` on.
    """
    columns = torch.arange(num_rows)
    rows = columns[first if step else 0 :, None]
    of_steps = [columns <= rows - step, *(columns[first:] == rows - step + earlier for earlier in range(1, step + 1))]
    return torch.cat(of_steps, 1)[None, None]


class UnrolledNetwork(DraftNetwork):
    """A head of one layer that drafts further tokens from its own states."""

    def unrolled_states(
        self, stream: Tensor, features: Tensor, num_steps: int, *, first: int = 0, positions: Tensor | None = None
    ) -> Iterator[Tensor]:
        """States [batch, rows, state size] of every step, for embeddings ``stream`` and the target's ``features``,
        [batch, n, ...] each. Step 0 has all n rows, the others those from ``first`` on. In step k, the first k of these
        mean nothing, because there is nothing before them to be drafted from. ``positions`` [axes, batch, n] are for
        networks with three axes.
        """
        rows = torch.arange(stream.shape[1], device=stream.device)
        positions = rows[None, None] if positions is None or self.axes is None else positions
        factors, cache = self.join_axes(self.factors(positions)), UnrolledKeys()
        for step in range(num_steps):
            context = AttentionContext(unrolled_mask(len(rows), step, first).to(stream.device), (cache,))
            states = self(self.fuse(stream, features), features, factors, context)
            yield states
            if step == 0:
                stream, features, factors = stream[:, first:], features[:, first:], factors[:, first:]
                states = states[:, first:]
            features = torch.cat([features[:, :1], self.own_features(states)[:, :-1]], 1)

    def loss(
        self, batch: TeacherBatch, settings: LossSettings, generator: torch.Generator, compare: Divergence = divergence
    ) -> tuple[Tensor, Metrics]:
        """The divergence from the target's distribution, averaged over the steps with falling weights.
        ``own_agreement`` is that of the later steps.
        """
        hidden, last, num_steps = batch.hidden, self.config.num_target_layers, settings.unrolled_steps
        features = self.target_features({layer: hidden[layer][:, :-1] for layer in self.layers_read(None)})
        stream, is_loss = batch.embeddings[:, 1:], batch.loss_mask[:, 1:]  # sequences without their first token
        teacher_logprobs = batch.head(hidden[last][:, 1:][is_loss]).float().log_softmax(-1)
        row = is_loss.nonzero()[:, 1]
        first = max(0, int(row.min()) - num_steps)  # drafting is unrolled from the first of these tokens on
        losses, agreements = [], []
        # The position is that of the token before, whose features are read, as where public heads are trained.
        steps = self.unrolled_states(stream, features, num_steps, first=first, positions=batch.positions[..., :-1])
        for step, states in enumerate(steps):
            is_drafted = row >= first + step
            logits = self.logits(states[is_loss[:, -states.shape[1] :]], batch.head)
            token_losses, agrees = compare(logits, teacher_logprobs)
            losses.append(token_losses[is_drafted].mean())
            agreements.append(agrees[is_drafted].mean().item())
        weights = torch.tensor([STEP_WEIGHT**step for step in range(num_steps)], device=stream.device)
        loss = (torch.stack(losses) * weights).sum() / weights.sum()
        later = agreements[1:] or agreements
        return loss, {"loss": loss.item(), "agreement": agreements[0], "own_agreement": sum(later) / len(later)}
