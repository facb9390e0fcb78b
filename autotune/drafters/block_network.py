"""Networks of ``DraftBlock``s, and their losses over the two readings of each batch.

Inside a tree a draft reads its own states in place of the target's features. In training each batch is therefore read
twice: with the target's features, and with runs of the draft's own states in their place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from autotune.documents.loss_settings import LossSettings
from autotune.documents.subnet import Operator, Subnet
from autotune.drafters.blocks import WITHIN_BATCH, AttentionContext, BlockCache, Crossing, DraftBlock, rotation
from autotune.drafters.draft import kept_tokens
from autotune.drafters.network import DraftNetwork, NetworkConfig, PromptRows
from autotune.drafters.teacher_batch import Divergence, Metrics, TeacherBatch, divergence
from autotune.files import parse_kind
from autotune.modeling.target import Target

OWN_FEATURE_RUN = 6  # tokens: one feature of the target, then the draft's own states


class BlocksConfig(NetworkConfig):
    """Sizes of a network of ``DraftBlock``s."""

    num_heads: int = Field(ge=1)
    head_size: int = Field(ge=2, multiple_of=2)
    mlp_size: int = Field(ge=1)
    rope_theta: float = Field(default=10000.0, gt=0)


class TokenLosses(NamedTuple):
    """Loss and agreement of every loss token of a batch, in both readings."""

    losses: Tensor  # [2, tokens]
    agrees: Tensor  # whether the draft's most probable token is the target's, [2, tokens]
    is_own: Tensor  # tokens that read the draft's own state in the second reading, [tokens]
    example: Tensor  # the example of each token, [tokens]
    early: Tensor  # the stream after the first block in the first reading, [tokens, hidden]


class BlocksNetwork(DraftNetwork):
    """A residual stream of the target's width through ``DraftBlock``s, followed by the target's head."""

    config_type: ClassVar[type[BlocksConfig]]
    loss_weights: ClassVar[tuple[float, float]]
    """Weights of the logits' and of the features' loss in the draft's paper."""
    config: BlocksConfig
    first_feature: nn.Parameter

    def __init__(self, config: BlocksConfig) -> None:
        super().__init__()
        self.config = config
        # Norm weights of the features of each injection layer, then of the draft's own states.
        self.feature_norms = nn.Parameter(torch.ones(len(config.injection_layers) + 1, config.hidden_size))
        self.first_feature = nn.Parameter(torch.zeros(config.hidden_size))
        self.norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.embedding = None
        self.token_ids: Tensor | None
        self.register_buffer("token_ids", None, persistent=False)

    @property
    @abstractmethod
    def blocks(self) -> list[DraftBlock]:
        """Blocks in execution order."""

    @property
    def crossing_share(self) -> float:
        across = sum(block.num_heads for block in self.blocks if block.has_cross_attention)
        return across / sum(block.num_heads for block in self.blocks)

    def new_block(self, *, has_cross_attention: bool = False) -> DraftBlock:
        config = self.config
        sizes = config.hidden_size, config.num_heads, config.head_size, config.mlp_size
        block = DraftBlock(*sizes, has_cross_attention=has_cross_attention)
        for linear in (block.from_stream, block.from_features, block.to_stream):
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02 if linear is block.to_stream else linear.in_features**-0.5)
        return block

    def new_caches(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> list[BlockCache]:
        size = self.config.head_size
        return [BlockCache(block.num_heads, size, capacity, dtype=dtype, device=device) for block in self.blocks]

    def target_features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The normalized output of the injection layer."""
        ((layer, states),) = hidden.items()
        number = self.config.injection_layers.index(layer)
        return nn.functional.layer_norm(states, states.shape[-1:], self.feature_norms[number])

    def own_features(self, states: Tensor) -> Tensor:
        return nn.functional.layer_norm(states, states.shape[-1:], self.feature_norms[-1])

    def factors(self, positions: Tensor) -> Tensor:
        return rotation(positions, self.config.head_size, self.config.rope_theta)

    def forward(
        self,
        stream: Tensor,
        features: Tensor,
        factors: Tensor,
        context: AttentionContext = WITHIN_BATCH,
        *,
        head_masks: Sequence[Tensor] | None = None,
        fan_out: Sequence[Tensor] | None = None,
        early: list[Tensor] | None = None,
    ) -> Tensor:
        """See ``DraftNetwork``.

        Args:
            head_masks: 0 for masked heads, for each block.
            fan_out: for each block, the row of the stream that each row of the block's batch continues; None: its own.
            early: receives the stream after the first block, which intermediate distillation aligns.
        """
        for number, block in enumerate(self.blocks):
            if fan_out is not None:
                stream = stream[fan_out[number]]
            stream = block(
                stream,
                features,
                factors,
                context,
                cache=context.caches[number],
                head_mask=None if head_masks is None else head_masks[number],
            )
            if number == 0 and early is not None:
                early.append(stream)
        return self.norm(stream)  # type: ignore[no-any-return]

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
