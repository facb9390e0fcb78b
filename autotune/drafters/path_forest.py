"""Chains from every position of an answer, by a draft with recurrent or convolution states. A state follows one path, so that
they are recorded one position at a time, in the forward passes of decoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from autotune.acceptance.trace import Forest
from autotune.drafters.forests import AnswerToRecord
from autotune.modeling.step import Step


class PathForestGrower:
    """The forest of one answer, for a draft that has evaluated its prompt. A root whose best child is the answer's next token
    shares the chain of the next root.
    """

    def __init__(self, draft: Any, answer: AnswerToRecord) -> None:
        self.draft, self.answer, self.tokens = draft, answer, answer.tokens
        self.depth, self.num_proposals = answer.bounds.depth, answer.bounds.num_proposals

    @torch.inference_mode()
    def grow_all(self) -> Forest:
        """All nodes; the first ones are the answer's own tokens, without the last one, which nothing follows."""
        num_roots = max(0, len(self.tokens) - 1)
        of_roots: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        of_others: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        links: list[tuple[int, int]] = []  # nodes and their first children
        for root in range(num_roots):
            proposed = self._propose(int(self.tokens[root]), root, 0)
            self.draft.cache.advance(1)
            of_roots.append(proposed)
            best = int(proposed[0][0])
            if root + 1 < num_roots and best == self.tokens[root + 1]:
                links.append((root, root + 1))
                continue
            node = root
            for level in range(1, self.depth):
                child = num_roots + len(of_others)
                links.append((node, child))
                of_others.append(self._propose(best, root, level))
                node, best = child, int(of_others[-1][0][0])
            self.draft.cache.keep([])
        nodes = [*of_roots, *of_others]
        shape = len(nodes), self.num_proposals
        child_node = np.full(shape, -1)
        for node, child in links:
            child_node[node, 0] = child
        child_token = np.array([tokens for tokens, _ in nodes], np.int64).reshape(shape)
        child_logprob = np.array([logprobs for _, logprobs in nodes], np.float32).reshape(shape)
        return Forest(self.tokens, child_token, child_logprob, child_node)

    def _propose(self, token: int, root: int, level: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Evaluate a token of a root's chain after those of the levels before; returns its best children and their
        log-probabilities.
        """
        num_before = max(0, level - 1)  # the root itself is committed
        step = Step(np.array([token]), np.array([num_before]), np.zeros((1, num_before + 1), np.float32))
        coupling = self.answer.coupling(np.array([root + level + 1]))  # of the children
        tokens, logprobs = self.draft.best(self.draft.forward(step), self.num_proposals, coupling)
        return tokens[0], logprobs[0]
