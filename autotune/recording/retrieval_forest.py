"""Grows the forests of a retrieval draft."""

from __future__ import annotations

import numpy as np

from autotune.acceptance.trace import ForestBounds
from autotune.drafters.retrieval import RetrievalDraft
from autotune.recording.forest_grower import ForestGrower
from autotune.trees.limits import Ints


class RetrievalForestGrower(ForestGrower):
    """Indexes the whole answer; a root sees it up to itself.

    Args:
        draft: has indexed the prompt.
        tokens: the answer.
    """

    def __init__(self, draft: RetrievalDraft, tokens: Ints, bounds: ForestBounds) -> None:
        super().__init__(tokens, bounds, num_levels=0)
        self.draft = draft
        self.prompt_length = draft.length
        for token in tokens:
            draft.append(int(token))
        # Of all evaluated tokens; the first ones are the roots.
        self._token = tokens[: self.num_roots].astype(np.int64)
        self._parent = np.full(self.num_roots, -1)
        self._evaluate(np.arange(self.num_roots), last_answer=np.arange(self.num_roots))

    def _evaluate(self, nodes: Ints, last_answer: Ints) -> None:
        num_visible = self.prompt_length + last_answer + 1
        tokens, logprobs = self.draft.propose_at(
            self._token, self._parent, nodes, num_visible, self.bounds.num_proposals
        )
        self.evaluated.add(tokens.astype(np.int64), logprobs, last_answer, np.zeros((len(nodes), 0), np.int64))

    def _evaluate_children(self, parents: Ints, ranks: Ints, num_before: int) -> Ints:
        """See ``ForestGrower``. Every node is evaluated: what two roots see differs."""
        evaluated = self.evaluated
        nodes = evaluated.size + np.arange(len(parents))
        self._token = np.concatenate([self._token, evaluated.child_token[parents, ranks]])
        self._parent = np.concatenate([self._parent, parents])
        self._evaluate(nodes, evaluated.last_answer[parents])
        return nodes
