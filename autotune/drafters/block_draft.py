"""Runs a draft network that proposes the tokens of a whole block in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from autotune.acceptance.trace import Forest
from autotune.drafters.blocks import AttentionContext
from autotune.drafters.dflash import DFlashNetwork, block_embeddings
from autotune.drafters.draft import Coupling, Proposals, kept_tokens
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.forests import AnswerToRecord, LevelForestGrower
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.graph_runner import GraphKey
from autotune.modeling.packed_step import LAST, WORD_BITS, Layout, PackedStep
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.step import Evaluated
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
        self._pending, self._pending_rows = [], []
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

    def _read_pending(self, size: int = 0) -> Evaluated:
        """Evaluate a block after the pending tokens, and commit these; the logits are those of the block, [block size -
        1, vocabulary].
        """
        count, source = len(self._pending), self._pending_source()
        if self.graph_runner is None:
            evaluated = Evaluated(self._block_logits(self._features(source), self._pending[-1]))
        else:
            size = size or self.pending_size(count)
            key, reads = self._complete(GraphKey(Layout(size, 0, 0, 3), is_pending=True))
            forward = self.graph_runner.prepared(key, reads)
            packed = forward.step
            packed.header[LAST], packed.tokens[0] = count - 1, self._pending[-1]
            packed.rows[0], packed.rows[1], packed.rows[2] = 0, self.cache.length, self._num_condensed
            packed.rows[0, :count] = self._pending_rows
            evaluated = self._launch(self.graph_runner, key, forward)
        self._commit_pending(count)
        self._pending = []
        return evaluated

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int, coupling: Coupling | None = None) -> Proposals:
        """See ``Draft``. Nothing is proposed deeper than the block reaches."""
        if frontier[0] == ROOT:
            self.num_proposals, self.draw = num_proposals, None
            evaluated = self._read_pending()
            self._logits, self._best = evaluated.logits, None
            if evaluated.forward is not None and coupling is None:
                tokens, logprobs = evaluated.forward.wait()[..., :num_proposals]
                self._best = self._finite(tokens, logprobs.view(np.float32))
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

    def _forward_over_buffers(self, key: GraphKey, integers: Tensor) -> Outputs:
        """As ``_block_logits``. Rows are those of the target's features, the number of cached tokens, and that of
        prompt tokens that are not in the cache. The block overwrites the keys and values of the padding.
        """
        step, size = PackedStep.of(integers, key.layout), self.num_block_tokens
        features = self._features(self._rows_of_target(step.rows[0]))
        num_cached, num_condensed, count = step.rows[1, :1], step.rows[2, :1], step.header[LAST : LAST + 1] + 1
        of_context = num_cached + torch.arange(len(features), device=self.device)
        of_block = num_cached + count + torch.arange(size, device=self.device)
        slots = torch.cat([of_context, of_block])
        mask = slots.new_full((1 + size, 2 * (1 + size // (2 * WORD_BITS))), -1)  # the block's tokens see each other
        mask[0, 0], mask[0, 1:2] = 0, num_cached + count
        mask[1:, 0] = 0
        window_mask = None
        if self.network.window is not None:
            window_mask = mask.clone()[None, None]
            window_mask[..., 1:, 0] = of_block - self.network.window
        context = AttentionContext(mask[None, None], self.cache.blocks, slots)
        factors = self._factors[slots + num_condensed]
        logits = self._logits_of(step.tokens[:1], features, factors, context, window_mask)
        return self._result(key, step, logits), logits

    def blocks_along(self, answer: AnswerToRecord) -> Iterator[Tensor]:
        """The logits of the block after each token of an answer but the last, as decoding evaluates them."""
        for root, token in enumerate(answer.tokens[:-1]):
            self._target.features.write({layer: rows[root : root + 1] for layer, rows in answer.hidden.items()})
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
