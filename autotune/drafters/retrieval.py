"""``retrieval``: proposes what followed earlier occurrences of the last tokens in prompt and output. Needs no model.
Prompt lookup is its setting with matches of at most three tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from autotune.drafters.draft import Coupling, Proposals
from autotune.drafters.suffix_index import Bools, SuffixIndex
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

    A follower's probability is its share of the occurrences of that match; ties go to the most recent one. Placeholders
    of images are never proposed. Where nothing matches, nothing is proposed, and a round is a plain step.

    Args:
        max_match: tokens that are compared, at least 1.

    Raises:
        UserError: a value out of range.
    """

    kind = "retrieval"

    def __init__(self, *, max_match: int = MAX_MATCH) -> None:
        if max_match < 1:
            raise UserError(f"max_match must be at least 1; got {max_match}; fix that value")
        super().__init__()
        self.max_match = max_match
        self.match_length = 0
        """Length of the match of the root's context in the latest round, in tokens; 0: none."""
        self._target: Target | None = None

    def attach(self, target: Target) -> None:
        """See ``Draft``. Any vocabulary will do: only tokens that occurred are proposed."""
        if self._target is target:
            return
        is_excluded: Bools = np.zeros(target.vocab_size, np.bool_)
        is_excluded[[token for token in placeholders_of(target.model.config) if token < target.vocab_size]] = True
        self._target, self.vocab_size = target, target.vocab_size
        self._index = SuffixIndex(max_match=self.max_match, is_excluded=is_excluded)

    @property
    def length(self) -> int:
        """Tokens of the request that are indexed."""
        return self._index.length

    def prefill(self, prompt: Ints, visual_scores: Tensor | None, *, capacity: int) -> None:
        """Index a prompt."""
        self.reserve(len(prompt))
        self._index.append(prompt.astype(np.int32))

    def extend(self, tokens: Sequence[int]) -> None:
        self._index.append(np.array(tokens, np.int32))

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int, coupling: Coupling | None = None) -> Proposals:
        """See ``Draft``. Shares of occurrences are not coupled to the target's sampling."""
        num_visible = np.full(len(frontier), self.length)
        tokens, logprobs, match_length = self._index.followers(
            tree.token, tree.parent, frontier, num_visible, num_proposals
        )
        if frontier[0] == ROOT:
            self.match_length = int(match_length[0])
        return tokens, logprobs

    def continuation(self) -> Retrieved:
        """Continuation of the longest match of the request's last tokens, as one branch of ``MAX_RETRIEVED`` tokens."""
        return self._index.continuation()

    def propose_at(self, token: Ints, parent: Ints, nodes: Ints, num_visible: Ints, num_proposals: int) -> Proposals:
        return self._index.followers(token, parent, nodes, num_visible, num_proposals)[:2]

    def reserve(self, num_tokens: int) -> None:
        """Remove the request's tokens. The index grows when it must."""
        self._index.clear()

    def prepare_step(self, kv_length: int, *, num_pending: int = 0) -> None:
        """Index a text of ``kv_length`` tokens that repeats itself, so that a timed lookup finds matches. No token is
        pending.
        """
        if self.length != kv_length:
            self.reserve(kv_length)
            self._index.append(np.arange(-kv_length, 0, dtype=np.int32) % min(TIMED_PERIOD, self.vocab_size))
