"""The two readings of a batch in the training of drafts that read the target's features.

Inside a tree a draft reads its own states in place of the target's features. Each batch is therefore read twice: with
the target's features, and with runs of the draft's own states in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autotune.documents.subnet import Operator
from autotune.drafters.blocks import AttentionContext, Crossing
from autotune.drafters.draft import kept_tokens
from autotune.drafters.network import BlocksNetwork, PromptRows
from autotune.drafters.teacher_batch import TeacherBatch

OWN_FEATURE_RUN = 6  # tokens: one feature of the target, then the draft's own states


@dataclass(frozen=True)
class DraftRows:
    """A teacher batch as a draft reads it, with visual tokens pruned and condensed: [batch, n] or [batch, n,
    hidden].
    """

    embeddings: Tensor
    """Embeddings of the tokens at ``positions``."""
    stream: Tensor
    """Input of the first block."""
    features: Tensor
    """The target's features of the token before."""
    positions: Tensor
    """The column of the teacher batch that each row comes from."""
    loss_mask: Tensor
    all_features: Tensor
    """The features of every column of the teacher batch, which cross-attention blocks read, [batch, columns, hidden].
    """
    num_rows: Tensor
    """Number of rows of each example, [batch]."""
    is_pruned: bool
    """Whether tokens of the teacher batch have no row."""


def rows_of(
    network: BlocksNetwork,
    batch: TeacherBatch,
    *,
    visual_keep: float,
    injection_layer: int,
    generator: torch.Generator | None = None,
    operators: Sequence[Operator | None] | None = None,
) -> DraftRows:
    """The rows of a teacher batch for one subnet. ``generator`` makes the noise of trained compressors; ``operators``
    are those of the compressor for each example.
    """
    batch_size = len(batch.lengths)
    before = network.target_features({injection_layer: batch.hidden[injection_layer][:, :-1]})
    features = torch.cat([network.first_feature.expand(batch_size, 1, -1), before], 1)
    all_features = features
    stream = network.fuse(batch.embeddings, features)
    condensed = []
    for row, length in enumerate(batch.lengths.tolist()):
        is_visual = batch.is_visual[row, :length]
        kept = kept_tokens(is_visual, batch.visual_scores.get(row), visual_keep)
        rows = PromptRows(stream[row, kept], features[row, kept], kept, is_visual[kept])
        question = batch.hidden[injection_layer][row, batch.loss_start[row]]
        condensed.append(network.condense(rows, question, generator, operators[row] if operators else None))
    padded = [nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*condensed, strict=True)]
    stream, features, positions, _ = padded
    num_rows = torch.tensor([len(rows.positions) for rows in condensed], device=positions.device)
    is_row = torch.arange(positions.shape[1], device=positions.device) < num_rows[:, None]
    wide = positions.unsqueeze(-1).expand(-1, -1, batch.embeddings.shape[2])
    return DraftRows(
        embeddings=batch.embeddings.gather(1, wide),
        stream=stream,
        features=features,
        positions=positions,
        loss_mask=batch.loss_mask.gather(1, positions) & is_row,
        all_features=all_features,
        num_rows=num_rows,
        is_pruned=bool((num_rows < batch.lengths).any()),
    )


class TwoPasses:
    """Keys and values of one block in both readings of a batch. The second reading evaluates the loss tokens only; all
    other tokens are before them and have the keys and values of the first.
    """

    def __init__(self, columns: Tensor, is_second: Tensor) -> None:
        """For each column of the first reading [batch, n]: the token of the second with its keys and values, and
        whether there is one.
        """
        self._columns = columns[:, None, None, :, None]
        self._is_second = is_second[:, None, None, :, None]
        self._first: Tensor | None = None

    def write(self, keys_values: Tensor, begin: int | Tensor) -> tuple[Tensor, Tensor]:
        if self._first is None:
            merged = self._first = keys_values
        else:
            shape = *keys_values.shape[:3], self._columns.shape[3], keys_values.shape[4]
            merged = torch.where(self._is_second, keys_values.gather(3, self._columns.expand(shape)), self._first)
        keys, values = merged.unbind(2)
        return keys, values


class TwoReadings:
    """Reads a batch of rows with the target's features, then its loss tokens again with some of the draft's own
    states.
    """

    def __init__(self, network: BlocksNetwork, rows: DraftRows, head_masks: Sequence[Tensor] | None) -> None:
        self.network, self.rows, self.head_masks = network, rows, head_masks
        first = rows.loss_mask.byte().argmax(1, keepdim=True)  # the loss tokens of a row are consecutive
        offsets = torch.arange(int(rows.loss_mask.sum(1).max()), device=first.device)
        self.again = (first + offsets).clamp(max=rows.positions.shape[1] - 1)
        """The rows that are read again, [batch, most loss tokens]."""
        self.is_again = offsets < rows.loss_mask.sum(1, keepdim=True)
        """False in the padding of ``again``."""
        columns = torch.arange(rows.positions.shape[1], device=first.device)
        self._caches = [self._cache(columns, first) for _ in network.blocks]
        self._factors = network.factors(rows.positions)
        self._is_crossing = rows.is_pruned and network.has_cross_attention
        if self._is_crossing:
            self._all_columns = torch.arange(rows.all_features.shape[1], device=first.device)
            first_column = rows.positions.gather(1, first)
            for number, block in enumerate(network.blocks):
                if block.has_cross_attention:
                    self._caches[number] = self._cache(self._all_columns, first_column)

    def _cache(self, columns: Tensor, first: Tensor) -> TwoPasses:
        offsets = columns - first
        last = (self.is_again.sum(1, keepdim=True) - 1).clamp(min=0)
        return TwoPasses(
            torch.minimum(offsets.clamp(min=0), last), (offsets >= 0) & (offsets <= last) & self.is_again[:, :1]
        )

    def with_target_features(self, early: list[Tensor]) -> Tensor:
        """States of all rows [batch, n, hidden]; see ``BlocksNetwork.forward``."""
        rows, network = self.rows, self.network
        crossing = None
        if self._is_crossing:
            crossing = Crossing(
                mask=(self._all_columns <= rows.positions[:, :, None])[:, None],
                features=rows.all_features,
                factors=network.factors(self._all_columns)[None],
            )
        context = AttentionContext(caches=self._caches, crossing=crossing)
        masks = self.head_masks
        return network(rows.stream, rows.features, self._factors, context, head_masks=masks, early=early)

    def with_own_features(self, states: Tensor, is_own: Tensor) -> Tensor:
        """States [batch, most loss tokens, hidden] of the rows ``again``. Where ``is_own`` [batch, n], they read the
        state of the row before in ``states``.
        """
        rows, network = self.rows, self.network

        def select(values: Tensor) -> Tensor:
            return values.gather(1, self.again[..., None].expand(-1, -1, values.shape[2]))

        own = network.own_features(select(torch.cat([states[:, :1], states[:, :-1]], 1)))
        reads_own = is_own.gather(1, self.again).unsqueeze(-1)
        features = torch.where(reads_own, own, select(rows.features))
        stream = torch.where(reads_own, network.fuse(select(rows.embeddings), own), select(rows.stream))
        columns = torch.arange(rows.positions.shape[1], device=self.again.device)
        positions = rows.positions.gather(1, self.again)
        crossing = Crossing((self._all_columns <= positions[:, :, None])[:, None]) if self._is_crossing else None
        mask = (columns <= self.again[:, :, None])[:, None]
        context = AttentionContext(mask, self._caches, crossing=crossing)
        return network(stream, features, network.factors(positions), context, head_masks=self.head_masks)


def own_feature_mask(rows: DraftRows, generator: torch.Generator, *, copies: int = 1) -> Tensor:
    """Rows that read the draft's own state of the row before [batch, n]: all answer tokens except the first of each run
    of OWN_FEATURE_RUN tokens. Runs begin at a random offset, the same for ``copies`` consecutive examples.
    """
    offset = torch.randint(OWN_FEATURE_RUN, (len(rows.positions) // copies, 1), generator=generator)
    offset = offset.repeat_interleave(copies, 0).to(rows.positions.device)
    follows = torch.zeros_like(rows.loss_mask)
    follows[:, 1:] = rows.loss_mask[:, :-1] & rows.loss_mask[:, 1:]
    return follows & ((rows.positions + offset) % OWN_FEATURE_RUN != 0)
