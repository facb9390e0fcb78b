"""Chains from every position of an answer, by a draft with recurrent or convolution states. A state follows one path,
so that they are recorded one position at a time, in the forward passes of decoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.drafters.draft import AnswerToRecord
from autotune.drafters.forests import ForestGrower
from autotune.modeling.step import Step
from autotune.trees.limits import Ints

BEST = np.zeros(1, np.int64)  # rank


class PathForestGrower(ForestGrower):
    """The forest of one answer. A root whose best child is the answer's next token shares the chain of the next root.

    Args:
        draft: has evaluated the prompt.
    """

    def __init__(self, draft: Any, answer: AnswerToRecord) -> None:
        super().__init__(answer)
        self.draft = draft
        shape, roots = (self.num_roots, self.bounds.num_proposals), np.arange(self.num_roots)
        self.evaluated.add(np.zeros(shape, np.int64), np.zeros(shape, np.float32), roots)  # later, by ``grow``

    def grow(self, first: int, end: int) -> int:
        """See ``ForestGrower``. The first child of a node is expanded."""
        evaluated, before = self.evaluated, self.evaluated.size
        for root in range(first, end):
            tokens, logprobs = self._propose(int(self.tokens[root]), root, 0)
            self.draft.cache.advance(1)
            evaluated.child_token[root], evaluated.child_logprob[root] = tokens, logprobs
            node, best = np.array([root]), int(tokens[0])
            if root + 1 < self.num_roots and best == self.tokens[root + 1]:
                self._links.append((node, BEST, root + 1))
                continue
            for level in range(1, self.bounds.depth):
                tokens, logprobs = self._propose(best, root, level)
                at = np.array([evaluated.size])
                evaluated.add(tokens[None], logprobs[None], np.array([root]))
                node, best = self._add_nodes(node, BEST, at), int(tokens[0])
            self.draft.cache.keep([])
        return end - first + evaluated.size - before

    def _propose(self, token: int, root: int, level: int) -> tuple[Ints, NDArray[np.float32]]:
        """Evaluate a token of a root's chain after those of the levels before; returns its best children and their
        log-probabilities.
        """
        num_before = max(0, level - 1)  # the root itself is committed
        step = Step(np.array([token]), np.array([num_before]), np.zeros((1, num_before + 1), np.float32))
        coupling = self.answer.coupling(np.array([root + level + 1]))  # of the children
        tokens, logprobs = self.draft.best(self.draft.forward(step), self.bounds.num_proposals, coupling)
        return tokens[0].astype(np.int64), logprobs[0]
