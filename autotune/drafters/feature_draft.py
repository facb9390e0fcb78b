"""Runs a draft network that reads the target's features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autotune.cost.table import ModelShape
from autotune.documents.subnet import Subnet
from autotune.drafters.blocks import AttentionContext, Crossing, FeatureCache
from autotune.drafters.cached_draft import CachedDraft, pad_rows, table_rows
from autotune.drafters.draft import LEAST_SHARED, Dimensions, Draft, FeatureSource, kept_tokens, notify
from autotune.drafters.network import DraftNetwork, PromptRows
from autotune.errors import UserError
from autotune.modeling.compiled_layers import CompiledLayers
from autotune.modeling.float8 import Float8Linear, round_weights, why_no_float8
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.graph_runner import GraphKey
from autotune.modeling.host import to_device
from autotune.modeling.masks import TreeMasks
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.quantization import weight_bytes
from autotune.modeling.step import LAST, Evaluated, PackedStep, Step
from autotune.modeling.target import Target
from autotune.modeling.tree_model import DEFAULT_CAPACITY
from autotune.trees.tree import MAX_STEP, ROOT, Ints, Tree


class FeatureDraft(CachedDraft):
    """Drafts with a network that reads outputs of the target's layers (see ``Draft``).

    Pruned tokens are missing from the stream and from self-attention. Cross-attention blocks attend to the features of
    all tokens (DREAM, section 3.1; STAR, section 3.1).

    A pending token is stored with the target's features of the token before it. After a round, the accepted nodes and
    the new root are pending.

    Args:
        network: a draft network, or a subnet sliced from a supernet.
        subnet: heads that the network keeps, and the injection layer, operator, vocabulary and weights to use. Its
            share of visual tokens applies later, prompt by prompt.

    Raises:
        UserError: a layer or an operator that the network does not have, or no token frequencies to cut its vocabulary
            by.
    """

    def __init__(self, network: DraftNetwork, subnet: Subnet | None = None) -> None:
        super().__init__()
        self.network = network
        self.kind = network.config.kind
        self._subnet = subnet = subnet or Subnet()
        if subnet.operator is not None or subnet.operator_ratio is not None:
            network.fix_operator(subnet.operator, subnet.operator_ratio)
        self.vocabulary = subnet.vocabulary or network.trained_share
        if self.vocabulary is not None:
            network.cut_vocabulary(self.vocabulary)
        self.aux_layers = network.layers_read(subnet.injection_layer)
        self.visual_keep = network.config.visual_keep
        self.token_ids = network.token_ids
        self.vocab_size = 0  # the target's, after ``attach``
        self._pending_rows: list[int] = []
        """The target's ``FeatureRows`` of the tokens before the pending ones."""
        self._target: Any = None
        self._num_condensed = 0  # tokens of the prompt that are not in the stream

    description = Draft.description

    @property
    def subnet(self) -> Subnet:
        layer = self.aux_layers[0] if len(self.aux_layers) == 1 else None
        used = {"injection_layer": layer, "visual_keep": self.visual_keep, "visual_ranking": Subnet().visual_ranking}
        return self._subnet.model_copy(update=used)

    @property
    def num_parameters(self) -> int:
        own = sum(parameter.numel() for parameter in self.network.parameters())
        return own + (self.head_parameters if self.vocabulary is not None else 0)

    @property
    def weight_bytes(self) -> int:
        return sum(map(weight_bytes, {self.network, self._text.head} - {self._target.text.head}))

    @property
    def shape(self) -> ModelShape:
        """See ``Draft``. The output head is the target's, or a copy of a part of it or in float8."""
        text_parameters = self.num_parameters + (self.head_parameters if self.vocabulary is None else 0)
        read = nn.ModuleList([self.network, self._text.head] if self.head_parameters else [self.network])
        return ModelShape(
            architecture=self.kind,
            num_layers=len(self.cache.blocks),
            hidden_size=self.network.config.hidden_size,
            text_parameters=text_parameters,
            vision_parameters=0,
            kv_bytes_per_token=self.kv_bytes_per_token,
            bytes_per_parameter=weight_bytes(read) / text_parameters if self._subnet.weights else self.dtype.itemsize,
            # Four kernels round the inputs of a product.
            layer_kernels=40
            + 4 * sum(isinstance(module, Float8Linear) for module in read.modules()) // len(self.cache.blocks),
            crossing_share=self.network.crossing_share,
        )

    @property
    def dimensions(self) -> Dimensions:
        """See ``Draft``. A supernet without a cross-attention block reads no features, so that all layers would make
        one draft: the last one stands for them.
        """
        network = self.network
        layers = network.config.injection_layers if network.is_supernet else ()
        return Dimensions(
            layers if network.has_cross_attention else layers[-1:],
            network.operators,
            network.token_frequencies is not None,
            why_no_float8(self.device) is None,
        )

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head through which the draft computes logits; 0 where they are the network's own."""
        if self.token_ids is not None and self.vocabulary is None:
            return 0
        num_tokens = self.vocab_size if self.token_ids is None else len(self.token_ids)
        return self.network.config.hidden_size * num_tokens

    def attach(self, target: Target) -> None:
        """See ``Draft``. The draft uses the target's embedding and head.

        Raises:
            UserError: a target with another size or vocabulary, or on a GPU that does not multiply float8 weights.
        """
        if self._target is not None and self._target.model is target.model:
            self._target = target  # perhaps another decoder's, whose features are read from here on
            return
        config, text = self.network.config, target.text
        for name, ours, theirs in (
            ("hidden_size", config.hidden_size, text.config.hidden_size),
            ("num_hidden_layers", config.num_target_layers, len(text.layers)),
        ):
            if ours != theirs:
                raise UserError(
                    f"this {self.kind} draft was made for a target with {name} {ours}; this one has {theirs}; "
                    "use a draft made for this target"
                )
        embedding = self.network.embedding
        lowest, highest = (0, -1) if self.token_ids is None else map(int, self.token_ids.aminmax())
        if min(lowest, target.vocab_size - 1 - highest) < 0 or (
            embedding is not None and embedding.num_embeddings < LEAST_SHARED * target.vocab_size
        ):
            own = highest + 1 if embedding is None else max(highest + 1, embedding.num_embeddings)
            raise UserError(
                f"target and draft must share one vocabulary; the target has {target.vocab_size} tokens, this {self.kind} "
                f"draft knows {own}; use a draft made for this target"
            )
        self._target = target
        self.network.to(target.device, target.dtype)
        self.device, self.dtype = target.device, target.dtype
        self.token_ids = self.network.token_ids  # on the network's new device
        self.vocab_size = self.target_vocab_size = target.vocab_size
        self._embed: Any = _shared_embedding(embedding, target.vocab_size) or text.module.get_input_embeddings()
        cut = self.token_ids if self.vocabulary is not None else None
        self._text = text if cut is None else text.with_vocabulary(cut)
        if self._subnet.weights is not None:
            if self.device.type != "cpu" and (reason := why_no_float8(self.device)) is not None:
                raise UserError(
                    f"weights in float8 need a GPU that multiplies them, and {self.device} does not ({reason}); leave weights "
                    "out, or search again on this device"
                )
            round_weights(self.network)
            if self.head_parameters and text.has_plain_head:
                self._text = replace(self._text, head=round_weights(self._text.head))
        # States of the root and the tokens evaluated since, from which their children take features.
        self._own = torch.zeros(0, config.width, dtype=self.dtype, device=self.device)
        for runner in self._graph_runners.values():
            runner.reset()
        self._allocate(DEFAULT_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        caches = self.network.new_caches(capacity, dtype=self.dtype, device=self.device)
        self.cache = FeatureCache(caches, capacity)
        self._masks = TreeMasks({"mask": None}, dtype=self.dtype, device=self.device)
        self._factors = self.network.factors(torch.arange(2 * capacity, device=self.device))
        self._own = torch.zeros(capacity, self._own.shape[1], dtype=self.dtype, device=self.device)

    @property
    def num_position_axes(self) -> int:
        """Number of position axes."""
        return 1 if self.network.axes is None else 3

    def reserve(self, num_tokens: int) -> None:
        super().reserve(num_tokens)
        self._num_condensed, self._rope_delta = 0, np.zeros(self.num_position_axes, np.int64)

    def prefill(self, prompt: EncodedPrompt, visual_scores: Tensor | None, *, capacity: int) -> None:
        """See ``Draft``. The target must have prefilled the same prompt just before."""
        self.reserve(max(capacity, len(prompt) + MAX_STEP))
        self._pending, self._pending_rows = [], []
        network = self.network
        hidden = {layer: self._target.hidden[layer][: len(prompt)] for layer in self.aux_layers}
        before = network.target_features({layer: states[:-1] for layer, states in hidden.items()})
        first = before.new_zeros(1, before.shape[1]) if network.first_feature is None else network.first_feature[None]
        features = torch.cat([first, before])
        kept = kept_tokens(prompt.is_visual, visual_scores, self.visual_keep)
        if network.first_feature is None:
            kept = kept[kept > 0]
        stream, kept_features, is_visual = self._embeddings(prompt)[kept], features[kept], prompt.is_visual[kept]
        rows = PromptRows(network.fuse(stream, kept_features), kept_features, kept, is_visual)
        stream, kept_features, positions, _ = network.condense(rows, hidden[self.aux_layers[-1]][-1])
        self.cache.length = len(positions)
        self._num_condensed = len(prompt) - len(positions)
        at = positions[None]
        if network.axes is not None:
            # A token's features are those of the token before, and heads are trained at that token's position. All are
            # one further here, which changes no attention and counts text as on one axis.
            self._rope_delta, at = np.broadcast_to(prompt.rope_delta, 3), prompt.own_positions[..., positions - 1] + 1
        factors = network.join_axes(self._factors[at.flatten(0, -2).clamp(max=len(self._factors) - 1)])[None]
        crossing = None
        if self._is_crossing:
            columns = torch.arange(len(prompt), device=self.device)
            mask = (columns <= positions[:, None])[None, None]
            crossing = Crossing(mask, 0, features[None], self._factors[columns][None])
        if len(positions) > 0:
            context = AttentionContext(None, self.cache.blocks, crossing=crossing)
            network(stream[None], kept_features[None], factors, context)

    def _embeddings(self, prompt: EncodedPrompt) -> Tensor:
        """The target's embeddings [n, hidden], with the draft's own embeddings for text if it has any."""
        embeddings: Tensor = self._target.embeddings(prompt)
        if self.network.embedding is None:
            return embeddings
        text = self._embed(prompt.tokens.masked_fill(prompt.is_visual, 0))
        return torch.where(prompt.is_visual[:, None], embeddings, text)

    def _append(self, token: int) -> None:
        self._pending.append(token)
        self._pending_rows += self._target.features.hold(np.zeros(1, np.int64))

    @property
    def _must_read(self) -> bool:
        return bool(self._target.features.is_full)

    @property
    def _is_crossing(self) -> bool:
        """Whether cross-attention blocks attend to more tokens than the others."""
        return self._num_condensed > 0 and self.network.has_cross_attention

    def prepare_step(self, kv_length: int, *, num_pending: int = 0, num_pruned: int = 0) -> None:
        super().prepare_step(kv_length, num_pending=num_pending)
        self._num_condensed, self._rope_delta = num_pruned, np.zeros(self.num_position_axes, np.int64)
        self._target.features.next_pass(self.aux_layers, 1)
        self._pending_rows = [0] * num_pending

    def numbers_pruned(self, visual_keep: float) -> tuple[int, ...]:
        return (0, 1) if visual_keep < 1.0 and self.network.has_cross_attention else (0,)

    def evaluate_step(self, step: Step, source: FeatureSource) -> Evaluated:
        count, first = len(step.tokens), step.num_uncommitted
        prefix, whole_prefix = self.cache.length, self.cache.length + self._num_condensed
        positions = np.minimum(step.offsets + whole_prefix + self._rope_delta[:, None], len(self._factors) - 1)
        if self.graph_runner is not None:
            prefixes = np.array([prefix, whole_prefix][: 1 + self._is_crossing])
            rows = self._captured_rows(step, positions, source)
            return self._run_captured(step, prefixes, np.zeros_like(prefixes), step.offsets, rows)
        features = pad_rows(self._features(source), count)
        mask: Any = None
        crossing_mask: Any = None
        if count > 1 or step.tree_mask.any():  # a node of a chain sees all tokens before it
            column_offsets = np.zeros(step.tree_mask.shape[1], np.int64)
            mask = self._masks.write(step.tree_mask, prefix, step.offsets, column_offsets)
            if self._is_crossing:
                crossing_mask = self._masks.write(step.tree_mask, whole_prefix, step.offsets, column_offsets)
        crossing = Crossing(crossing_mask, whole_prefix + first) if self._is_crossing else None
        ids = to_device(step.tokens, self.device)
        context = AttentionContext(mask, self.cache.blocks, prefix + first, crossing)
        factors = self.network.join_axes(table_rows(self._factors, positions))
        states = self._states(ids, features, factors, context)
        if step.only is None:
            self._own[1 + first : 1 + first + count] = states
        else:
            states = self._own[:1] = states[step.only : step.only + 1]
        return Evaluated(self.logits(states))

    def _captured_rows(self, step: Step, positions: Ints, source: FeatureSource) -> Ints:
        """Rows of the packed step: the positions, the rows that features are read from, and the rows of ``_own`` to
        which states are written.
        """
        assert not isinstance(source, Mapping), "captured steps read features by rows"
        read, written = np.zeros(len(step.tokens), np.int64), np.arange(1, len(step.tokens) + 1)
        if step.only is None:
            read, written = source + 1, written + step.num_uncommitted
        else:
            read[: len(source)] = source
            written[step.only] = 0
        return np.concatenate([positions, [read, written]])

    def _compiled_layers(self) -> CompiledLayers:
        return CompiledLayers([self.network], description=self.description)

    def _complete(self, key: GraphKey) -> tuple[GraphKey, list[Tensor]]:
        key, reads = super()._complete(key)
        if not key.is_pending:
            return key, reads
        rows = [self._target.features.layers[layer] for layer in self.aux_layers]
        return key._replace(addresses=(*key.addresses, *(tensor.data_ptr() for tensor in rows))), [*reads, *rows]

    def _features(self, source: FeatureSource) -> Tensor:
        if isinstance(source, Mapping):
            return self.network.target_features(source)
        return self.network.own_features(table_rows(self._own, source + 1))

    def _states(self, ids: Tensor, features: Tensor, factors: Tensor, context: AttentionContext) -> Tensor:
        """The network's states of n tokens, [n, state size]."""
        stream = self.network.fuse(self._embed(ids), features)
        (states,) = self.network(stream[None], features[None], factors[None], context)
        return states  # type: ignore[no-any-return]

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., vocabulary] of the network's states; over the tokens of a cut vocabulary alone, if it
        has one.
        """
        return self.network.logits(states, self._text.logits)

    def _forward_over_buffers(self, key: GraphKey, integers: Tensor) -> Outputs:
        step = PackedStep.of(integers, key.layout)
        masks, read, written = step.masks[:, None, None], step.rows[-2], step.rows[-1]
        if key.is_pending:
            features = self._features(self._rows_of_target(read))
        else:
            features = self.network.own_features(self._own.index_select(0, read))
        crossing = Crossing(masks[1], step.slots(1)) if len(masks) > 1 else None
        context = AttentionContext(masks[0], self.cache.blocks, step.slots(), crossing)
        factors = self.network.join_axes(self._factors[step.rows[:-2]])
        states = self._states(step.tokens, features, factors, context)
        self._own.index_copy_(0, written, states)
        logits = self.logits(states.index_select(0, step.header[LAST : LAST + 1]) if key.is_pending else states)
        return self._result(key, step, logits), logits

    def _rows_of_target(self, rows: Tensor) -> dict[int, Tensor]:
        """The target's features at rows [n], [n, hidden] for each layer."""
        return {layer: self._target.features.layers[layer].index_select(0, rows) for layer in self.aux_layers}

    def _pending_source(self) -> FeatureSource:
        rows = np.array(self._pending_rows)
        return rows if self.graph_runner is not None else self._rows_of_target(to_device(rows, self.device))

    def _commit_pending(self, count: int) -> None:
        self.cache.length += count
        self._pending_rows = []
        self._target.features.release()

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        """See ``Draft``. The features of the new pending tokens come from the verification of the tree."""
        self._make_room_for_pending(len(path) + 1)
        self._pending += [*tree.token[path].tolist(), next_token]
        self._pending_rows += self._target.features.hold(np.array([ROOT, *path]))


def _shared_embedding(embedding: nn.Embedding | None, vocab_size: int) -> Callable[[Tensor], Tensor] | None:
    """A draft's own embedding, which reads tokens of the target that it does not have as token 0."""
    if embedding is None or (size := embedding.num_embeddings) >= vocab_size:
        return embedding
    notify(f"the target has {vocab_size} tokens, the draft's embedding {size}: it reads the others as token 0")
    return lambda tokens: embedding(tokens.where(tokens < size, 0))
