"""Runs a draft network that proposes the tokens of a whole block in one forward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from autotune.acceptance.trace import Forest
from autotune.drafters.blocks import AttentionContext
from autotune.drafters.cached_draft import pad_rows
from autotune.drafters.dflash import DFlashNetwork, block_embeddings
from autotune.drafters.draft import Coupling, Proposals, kept_tokens
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.forests import AnswerToRecord, LevelForestGrower
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.graph_runner import GraphKey, KVSlots
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.transfer import to_device
from autotune.trees.tree import MAX_STEP, ROOT, Ints, Tree

if TYPE_CHECKING:
    from autotune.modeling.target import Target


class BlockDraft(FeatureDraft):
    """Drafts with a ``DFlashNetwork``: the nodes of one level have the same children, and only the root's need a
    forward pass.

    The cache holds the context: the keys and values of committed tokens, from the target's features of these tokens. A
    pending token is one whose predecessor's features are not in the cache yet; the last of them, the root, begins the
    block.
    """

    network: DFlashNetwork
    drafts_blocks = True

    def attach(self, target: Target) -> None:
        if self._follows(target):
            return
        super().attach(target)
        config = self.network.config
        mask = torch.tensor(config.mask_token, device=self.device)
        self._mask_embedding = block_embeddings(self._embed, mask)
        # Of the latest block, whose first row is the distribution of the root's children, [block size - 1, vocabulary].
        size = self.vocab_size if self.token_ids is None else len(self.token_ids)
        self._logits = torch.zeros(config.block_size - 1, size, dtype=self.dtype, device=self.device)
        self._best: Proposals | None = None  # its best tokens by depth, without coupling

    @property
    def num_block_tokens(self) -> int:
        return self.network.config.block_size

    def reserve(self, num_tokens: int) -> None:
        super().reserve(num_tokens + self.num_block_tokens)

    def prefill(self, prompt: EncodedPrompt, visual_scores: Tensor | None, *, capacity: int) -> None:
        """See ``Draft``. The target must have prefilled the same prompt just before. The last token's features are
        pending.
        """
        self.reserve(max(capacity, len(prompt) + MAX_STEP))
        self._pending, self._pending_features = [], []
        kept = kept_tokens(prompt.is_visual, visual_scores, self.visual_keep)
        kept = kept[kept < len(prompt) - 1]
        hidden = {layer: self._target.hidden[layer][kept] for layer in self.aux_layers}
        context = AttentionContext(None, self.cache.blocks)
        self.network.add_context(self.network.target_features(hidden)[None], self._factors[kept][None], context)
        self.cache.length = len(kept)
        self._num_condensed = len(prompt) - 1 - len(kept)

    @torch.inference_mode()
    def forest(self, answer: AnswerToRecord) -> Forest:
        return BlockForestGrower(self, answer).grow_all()

    def read_pending(self, size: int = 0) -> Tensor:
        """Evaluate a block after the pending tokens, and commit these; returns its logits, [block size - 1,
        vocabulary].
        """
        count = len(self._pending)
        features = self._features(self._pending_hidden())
        if self.graph_runner is None:
            logits = self._block_logits(features, self._pending[-1])
        else:
            size = size or self.pending_size(count)
            key = GraphKey(size, (self.padded_length(self.cache.length + size + self.num_block_tokens),))
            inputs: dict[str, Ints | Tensor] = {
                "integers": np.array([self.cache.length, self._num_condensed, count, self._pending[-1]]),
                "features": pad_rows(features, size),
            }
            (logits,) = self.graph_runner.run(functools.partial(self._forward_over_buffers, key), key, inputs)
            logits = logits.clone()  # the buffers are valid only until the next forward pass
        self._commit_pending(count)
        self._pending = []
        return logits

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int, coupling: Coupling | None = None) -> Proposals:
        """See ``Draft``. Nothing is proposed deeper than the block reaches."""
        if frontier[0] == ROOT:
            self._logits, self._best = self.read_pending(), None
        depth, count = int(tree.depth[frontier[0]]), len(frontier)
        if depth >= len(self._logits):
            return np.full((count, num_proposals), -1, np.int32), np.full((count, num_proposals), -np.inf, np.float32)
        if coupling is None:
            # All depths at once, for one transfer a round.
            if self._best is None or self._best[0].shape[1] != num_proposals:
                self._best = self.best(self._logits, num_proposals)
            tokens, logprobs = self._best[0][depth], self._best[1][depth]
        else:
            (tokens,), (logprobs,) = self.best(self._logits[depth : depth + 1], num_proposals, coupling)
        return np.tile(tokens, (count, 1)), np.tile(logprobs, (count, 1))

    def _commit_pending(self, count: int) -> None:
        self.cache.length += count
        self._pending_features = []

    def _block_logits(self, features: Tensor, root: int) -> Tensor:
        """Logits of the block that begins with ``root``, after the features [m, hidden] of committed tokens."""
        count, size, prefix = len(features), self.num_block_tokens, self.cache.length
        first = prefix + self._num_condensed
        context = AttentionContext(None, self.cache.blocks, prefix)
        window_mask = None
        if (window := self.network.window) is not None and prefix + count + size > window:
            slots = torch.arange(prefix + count + size, device=self.device)
            window_mask = self._window_mask(slots[-size:], slots, window)
        factors = self._factors.narrow(0, first, count + size)
        return self._logits_of(to_device(np.array([root]), self.device), features, factors, context, window_mask)

    def _logits_of(
        self, root: Tensor, features: Tensor, factors: Tensor, context: AttentionContext, window_mask: Tensor | None
    ) -> Tensor:
        embedded = block_embeddings(self._embed, root)
        stream = torch.cat([embedded, self._mask_embedding.expand(self.num_block_tokens - 1, -1)])
        (states,) = self.network(stream[None], features[None], factors[None], context, window_mask=window_mask)
        return self.logits(states[1:])

    def _window_mask(self, rows: Tensor, columns: Tensor, window: int) -> Tensor:
        """The additive mask of sliding layers for tokens in the slots ``rows`` [n], [1, 1, n, columns]."""
        is_far = (rows[:, None] - columns).abs() > window
        mask = torch.zeros(is_far.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(is_far, self.mask_value)[None, None]

    def _forward_over_buffers(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> Outputs:
        """As ``_block_logits``. The integers are the number of cached tokens, the number of prompt tokens that are not
        in the cache, the number of features that are no padding, and the root. The block overwrites the padding's keys
        and values; what remains of them is hidden.
        """
        prefix, num_condensed, count, root = inputs["integers"].unsqueeze(1)
        features, size, (length,) = inputs["features"], self.num_block_tokens, key.kv_lengths
        columns = torch.arange(length, device=self.device)
        of_context = prefix + torch.arange(len(features), device=self.device)
        of_block = prefix + count + torch.arange(size, device=self.device)
        slots = torch.cat([of_context, of_block])
        hidden = torch.zeros(1, 1, size, length, dtype=self.dtype, device=self.device)
        mask = hidden.masked_fill_(columns >= prefix + count + size, self.mask_value)
        window = self.network.window
        window_mask = None if window is None else torch.minimum(mask, self._window_mask(of_block, columns, window))
        context = AttentionContext(mask, self.cache.blocks, KVSlots(slots, length))
        factors = self._factors[slots + num_condensed]
        return (self._logits_of(root, features, factors, context, window_mask),)

    def blocks_along(self, answer: AnswerToRecord) -> Iterator[Tensor]:
        """The logits of the block after each token of an answer but the last, as decoding evaluates them."""
        for root, token in enumerate(answer.tokens[:-1]):
            self._target.hidden = {layer: rows[root : root + 1] for layer, rows in answer.hidden.items()}
            self.append(int(token))
            yield self.read_pending()


class BlockForestGrower(LevelForestGrower):
    """Evaluates one block for every root, as decoding does: the nodes of one level of a root's forest have the same
    children.
    """

    def __init__(self, draft: BlockDraft, answer: AnswerToRecord) -> None:
        super().__init__(answer)
        bounds = self.bounds
        shape = self.num_roots, bounds.depth, bounds.num_proposals
        tokens_at, logprobs_at = np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32)
        for root, block in enumerate(draft.blocks_along(answer)):
            logits = block[: bounds.depth]
            proposed = draft.best(logits, bounds.num_proposals, answer.coupling(root + 1 + np.arange(len(logits))))
            tokens_at[root, : len(logits)], logprobs_at[root, : len(logits)] = proposed
        # The roots' children first, then those of the other levels, root by root.
        for levels in (slice(1), slice(1, None)):
            tokens = tokens_at[:, levels].reshape(-1, bounds.num_proposals)
            logprobs = logprobs_at[:, levels].reshape(-1, bounds.num_proposals)
            self.evaluated.add(tokens, logprobs, np.zeros(len(tokens), np.int64), np.zeros((len(tokens), 0), np.int64))

    def _evaluate_children(self, parents: Ints, ranks: Ints, num_before: int) -> Ints:
        """See ``LevelForestGrower``. The children of a level are where those of its first node are."""
        num_others = self.bounds.depth - 1
        root, level = np.divmod(parents - self.num_roots, max(1, num_others))
        is_root = parents < self.num_roots
        first = self.num_roots + np.where(is_root, parents, root) * num_others
        return np.where(is_root, first, first + level + 1)
