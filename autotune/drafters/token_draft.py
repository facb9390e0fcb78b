"""Drafts without a model: what they propose depends on the tokens of the request alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from autotune.cost.table import ModelShape
from autotune.drafters.draft import AnswerToRecord, Coupling, Draft, Proposals
from autotune.drafters.forests import LevelForestGrower
from autotune.modeling.prompt import EncodedPrompt, token_rows
from autotune.modeling.target import Target
from autotune.replay.trace import Forest
from autotune.trees.tree import Ints, Tree


class TokenDraft(Draft):
    """A draft without forward passes."""

    sees_images = False
    device = torch.device("cpu")
    graph_runner = None
    num_parameters = kv_bytes_per_token = 0
    shape = ModelShape(
        num_layers=0, hidden_size=0, text_parameters=0, vision_parameters=0, kv_bytes_per_token=0, bytes_per_parameter=0
    )

    def attach(self, target: Target) -> None:
        """See ``Draft``. Any vocabulary will do."""
        self.vocab_size = target.vocab_size

    def prompts(self, inputs: dict[str, Any], target_prompts: Sequence[EncodedPrompt] = ()) -> list[Ints]:
        return [row.cpu().numpy().astype(np.int64) for row in token_rows(inputs)]

    def append(self, token: int) -> None:
        self.extend([token])

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Add committed tokens."""

    @abstractmethod
    def propose_at(self, token: Ints, parent: Ints, nodes: Ints, num_visible: Ints, num_proposals: int) -> Proposals:
        """Proposals for nodes of several trees, as in the rounds that begin at different tokens of the request.

        Args:
            token, parent: of the nodes of all trees, [tree nodes]; roots have parent -1.
            nodes: the nodes asked for, [nodes].
            num_visible: tokens of the request up to the root of each, [nodes].
        """

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int, coupling: Coupling | None = None) -> Proposals:
        """See ``Draft``. Proposals are not coupled to the target's sampling."""
        return self.propose_at(tree.token, tree.parent, frontier, np.full(len(frontier), self.length), num_proposals)

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        self.extend([*tree.token[path].tolist(), next_token])

    @abstractmethod
    def reserve(self, num_tokens: int) -> None:
        """Remove the request's tokens."""

    def forest(self, answer: AnswerToRecord) -> Forest:
        return TokenForestGrower(self, answer).grow_all()

    def prepare_step(self, kv_length: int, *, num_pending: int = 0) -> None:
        """Begin a request of ``kv_length`` tokens, so that a proposal can be timed. No token is pending."""
        if self.length != kv_length:
            self.reserve(kv_length)
            self.extend([0] * kv_length)


class TokenForestGrower(LevelForestGrower):
    """Reads the whole answer; a root sees it up to itself. Every node is evaluated: what two roots see differs."""

    def __init__(self, draft: TokenDraft, answer: AnswerToRecord) -> None:
        super().__init__(answer)
        self.draft = draft
        self.prompt_length = draft.length
        draft.extend(self.tokens.tolist())
        # Of all evaluated tokens; the first ones are the roots.
        self._token = self.tokens[: self.num_roots].astype(np.int64)
        self._parent = np.full(self.num_roots, -1)
        self._evaluate(np.arange(self.num_roots), last_answer=np.arange(self.num_roots))

    def _evaluate(self, nodes: Ints, last_answer: Ints) -> None:
        num_visible = self.prompt_length + last_answer + 1
        proposals = self.draft.propose_at(self._token, self._parent, nodes, num_visible, self.bounds.num_proposals)
        tokens, logprobs = proposals
        self.evaluated.add(tokens.astype(np.int64), logprobs, last_answer, np.zeros((len(nodes), 0), np.int64))

    def _evaluate_children(self, parents: Ints, ranks: Ints, num_before: int) -> Ints:
        evaluated = self.evaluated
        nodes = evaluated.size + np.arange(len(parents))
        self._token = np.concatenate([self._token, evaluated.child_token[parents, ranks]])
        self._parent = np.concatenate([self._parent, parents])
        self._evaluate(nodes, evaluated.last_answer[parents])
        return nodes
