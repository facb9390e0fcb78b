"""Grows the forests of a draft that proposes whole blocks: the nodes of one level of a root's forest have the same children."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from autotune.acceptance.trace import ForestBounds
from autotune.drafters.block_draft import BlockDraft
from autotune.modeling.target import Target
from autotune.recording.forest_grower import ForestGrower
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.limits import Ints


class BlockForestGrower(ForestGrower):
    """Evaluates one block for every root, as decoding does.

    Args:
        draft: has evaluated the prompt.
        tokens: the answer.
        answer_hidden: the target's outputs before each token of the answer, by layer.
        first_position, sampler: as in ``ModelForestGrower``.
    """

    def __init__(
        self,
        target: Target,
        draft: BlockDraft,
        tokens: Ints,
        bounds: ForestBounds,
        answer_hidden: Mapping[int, Tensor],
        *,
        first_position: int,
        sampler: TokenSampler | None,
    ) -> None:
        super().__init__(tokens, bounds, num_levels=0)
        shape = self.num_roots, bounds.depth, bounds.num_proposals
        tokens_at, logprobs_at = np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32)
        for root in range(self.num_roots):
            target.hidden = {layer: rows[root : root + 1] for layer, rows in answer_hidden.items()}
            draft.append(int(tokens[root]))
            logits = draft.read_pending()[: bounds.depth]
            coupling = None
            if sampler is not None:
                positions = first_position + root + 1 + np.arange(len(logits))  # of the children
                coupling = functools.partial(sampler.proposal_scores, positions=positions)
            found = draft.best(logits, bounds.num_proposals, coupling)
            tokens_at[root, : len(logits)], logprobs_at[root, : len(logits)] = found
        # The roots' children first, then those of the other levels, root by root.
        for levels in (slice(1), slice(1, None)):
            of_nodes = tokens_at[:, levels].reshape(-1, bounds.num_proposals)
            logprobs = logprobs_at[:, levels].reshape(-1, bounds.num_proposals)
            self.evaluated.add(
                of_nodes, logprobs, np.zeros(len(of_nodes), np.int64), np.zeros((len(of_nodes), 0), np.int64)
            )

    def _evaluate_children(self, parents: Ints, ranks: Ints, num_before: int) -> Ints:
        """See ``ForestGrower``. The children of a level are where those of its first node are."""
        num_others = self.bounds.depth - 1
        root, level = np.divmod(parents - self.num_roots, max(1, num_others))
        is_root = parents < self.num_roots
        first = self.num_roots + np.where(is_root, parents, root) * num_others
        return np.where(is_root, first, first + level + 1)
