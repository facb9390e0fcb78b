"""``retrieval``: proposes what followed earlier occurrences of the last tokens in prompt and output, and, if asked for, in
earlier answers. Needs no model. Prompt lookup is its setting with matches of at most three tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from autotune.drafters.draft import Coupling, Proposals
from autotune.drafters.suffix_index import SEPARATOR, Bools, Float32s, Int32s, SuffixIndex
from autotune.drafters.token_draft import TokenDraft
from autotune.errors import UserError
from autotune.modeling.prompt import placeholders_of
from autotune.trees.tree import ROOT, Ints, Retrieved, Tree

if TYPE_CHECKING:
    from autotune.modeling.target import Target

MAX_MATCH = 16  # tokens
TIMED_PERIOD = 48  # tokens after which the text repeats whose lookups are timed


class RetrievalDraft(TokenDraft):
    """Proposes the followers of the longest match of the context's last tokens in the tokens before.

    A follower's probability is its share of the occurrences of that match; ties go to the most recent one. Placeholders of
    images are never proposed. Where nothing matches, nothing is proposed, and a round is a plain step.

    Args:
        min_match: tokens of the shortest match that counts.
        max_match: tokens that are compared.
        corpus_tokens: limit on the earlier answers of this draft that are searched too, in tokens. The oldest answers leave
            first. 0: only the request's own prompt and output are searched, so that proposals depend on nothing else.

    Raises:
        UserError: a value out of range.
    """

    kind = "retrieval"

    def __init__(self, *, min_match: int = 1, max_match: int = MAX_MATCH, corpus_tokens: int = 0) -> None:
        if not 1 <= min_match <= max_match:
            raise UserError(f"min_match must be from 1 to max_match, {max_match}; got {min_match}; fix that value")
        if corpus_tokens < 0:
            raise UserError(f"corpus_tokens must be at least 0; got {corpus_tokens}; 0 searches no earlier answers")
        super().__init__()
        self.min_match, self.max_match, self.corpus_tokens = min_match, max_match, corpus_tokens
        self.match_length = 0
        """Length of the match of the root's context in the latest round, in tokens; 0: none."""
        self._target: Target | None = None
        self._answers: deque[Int32s] = deque()  # of earlier requests; the index holds them before the request
        self._request_start = self._answer_start = 0  # of the request and of its output in the index

    def attach(self, target: Target) -> None:
        """See ``Draft``. Any vocabulary will do: only tokens that occurred are proposed."""
        if self._target is target:
            return
        is_excluded: Bools = np.zeros(target.vocab_size, np.bool_)
        is_excluded[[token for token in placeholders_of(target.model.config) if token < target.vocab_size]] = True
        self._target, self.vocab_size = target, target.vocab_size
        self._index = SuffixIndex(min_match=self.min_match, max_match=self.max_match, is_excluded=is_excluded)
        self._answers.clear()
        self._request_start = self._answer_start = 0

    @property
    def length(self) -> int:
        """Tokens of the request that are indexed."""
        return self._index.length - self._request_start

    def prefill(self, prompt: Ints, visual_scores: Tensor | None, *, capacity: int) -> None:
        """Index a prompt. The output of the request before enters the corpus, if there is one."""
        answer = self._index.tokens[self._answer_start :].copy()
        self._index.truncate(self._request_start)
        if self.corpus_tokens > 0 and len(answer) > 0:
            self._add_answer(answer[-self.corpus_tokens :])
        self._index.append(prompt.astype(np.int32))
        self._answer_start = self._index.length

    def _add_answer(self, answer: Int32s) -> None:
        """Put an answer at the end of the corpus; the oldest answers leave it."""
        num_tokens = sum(map(len, self._answers)) + len(answer)
        self._answers.append(answer)
        added = [answer]
        while num_tokens > self.corpus_tokens:
            num_tokens -= len(self._answers.popleft())
            self._index.truncate(0)
            added = [*self._answers]
        for one in added:
            self._index.append(np.append(one, np.int32(SEPARATOR)))
        self._request_start = self._index.length

    def extend(self, tokens: Sequence[int]) -> None:
        self._index.append(np.array(tokens, np.int32))

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int, coupling: Coupling | None = None) -> Proposals:
        """See ``Draft``. Shares of occurrences are not coupled to the target's sampling."""
        num_visible = np.full(len(frontier), self.length)
        tokens, logprobs, match_length = self._followers(tree.token, tree.parent, frontier, num_visible, num_proposals)
        if frontier[0] == ROOT:
            self.match_length = int(match_length[0])
        return tokens, logprobs

    def continuation(self) -> Retrieved:
        """Continuation of the longest match of the request's last tokens, as one branch of ``MAX_RETRIEVED`` tokens."""
        return self._index.continuation()

    def propose_at(self, token: Ints, parent: Ints, nodes: Ints, num_visible: Ints, num_proposals: int) -> Proposals:
        return self._followers(token, parent, nodes, num_visible, num_proposals)[:2]

    def _followers(
        self, token: Ints, parent: Ints, nodes: Ints, num_visible: Ints, num_proposals: int
    ) -> tuple[Int32s, Float32s, Int32s]:
        return self._index.followers(token, parent, nodes, self._request_start + num_visible, num_proposals)

    def reserve(self, num_tokens: int) -> None:
        """Remove the request's tokens. The index grows when it must."""
        self._index.truncate(self._request_start)
        self._answer_start = self._index.length

    def prepare_step(self, kv_length: int, *, num_pending: int = 0) -> None:
        """Index a text of ``kv_length`` tokens that repeats itself, so that a timed lookup finds matches. No token is pending."""
        if self.length != kv_length:
            self.reserve(kv_length)
            self._index.append(np.arange(-kv_length, 0, dtype=np.int32) % min(TIMED_PERIOD, self.vocab_size))
            self._answer_start = self._index.length
