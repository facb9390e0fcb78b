"""The target's outputs on a batch of training examples, and the divergence of a draft from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from autotune.documents.loss_settings import DistillationRule

Metrics = dict[str, float]
"""Figures to display and log, by name."""
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``divergence``, or its compiled form."""


def divergence(logits: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || draft) of every token, and 1 where the most probable tokens agree, otherwise 0; [tokens] each, from
    the draft's ``logits`` and the target's log-probabilities in float32, [tokens, vocabulary] each.
    """
    logprobs = logits.float().log_softmax(-1)
    found = functional.kl_div(logprobs, teacher_logprobs, reduction="none", log_target=True).sum(-1)
    return found, (logprobs.argmax(-1) == teacher_logprobs.argmax(-1)).float()


@dataclass(frozen=True)
class TeacherBatch:
    """A batch of right-padded examples with the target's outputs on them."""

    embeddings: Tensor
    """Input of the target's first layer, [batch, n, hidden]."""
    is_visual: Tensor
    """[batch, n]"""
    lengths: Tensor
    """Number of tokens of each example, [batch]."""
    loss_start: Tensor
    """Index of the first token that is followed by a token of the answer, [batch]."""
    hidden: dict[int, Tensor]
    """Outputs of the requested layers, [batch, n, hidden] each; the last layer's after the final norm."""
    visual_scores: dict[int, Tensor]
    """Scores of the visual tokens by row, for pruning (STAR, eq. 2)."""
    entropies: Tensor | None
    """Mean attention entropy of each layer (AE) [layers], if requested."""
    head: Callable[[Tensor], Tensor]
    """The target's output head: logits of hidden states."""
    positions: Tensor
    """The tokens' positions in the target, [1 or 3 axes, batch, n]."""

    @property
    def loss_mask(self) -> Tensor:
        """Tokens that are followed by a token of the answer, [batch, n]. False in the padding."""
        columns = torch.arange(self.embeddings.shape[1], device=self.lengths.device)
        return (columns >= self.loss_start[:, None]) & (columns < self.lengths[:, None])

    def select(self, rows: Sequence[int]) -> TeacherBatch:
        """These rows as a batch of their own; a row may be repeated."""
        index = torch.tensor(rows, device=self.lengths.device)
        longest = int(self.lengths[index].max())
        return replace(
            self,
            embeddings=self.embeddings[index, :longest],
            is_visual=self.is_visual[index, :longest],
            lengths=self.lengths[index],
            loss_start=self.loss_start[index],
            hidden={layer: states[index, :longest] for layer, states in self.hidden.items()},
            positions=self.positions[:, index, :longest],
            visual_scores={new: self.visual_scores[row] for new, row in enumerate(rows) if row in self.visual_scores},
        )

    def distilled_layer(self, rule: DistillationRule) -> int:
        """The layer (from 1) whose output the first block imitates: the one of least AE (DREAM, section 3.2), or of
        least AE + |AE(l) - AE(l - 1)| (STAR, section 3.2). The last one is excluded: its output is the target of the
        feature loss.
        """
        assert self.entropies is not None
        entropies = self.entropies[:-1]
        if rule == "entropy-and-change" and len(entropies) > 1:
            change = (entropies[1:] - entropies[:-1]).abs()
            return 2 + int((entropies[1:] + change).argmin())
        return 1 + int(entropies.argmin())

    def serves(self, layers: Collection[int], rule: DistillationRule) -> bool:
        """Whether the batch holds these layers and the layer that the rule chooses."""
        if rule == "none":
            return self.hidden.keys() >= set(layers)
        return self.entropies is not None and self.hidden.keys() >= {*layers, self.distilled_layer(rule)}
