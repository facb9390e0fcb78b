"""``prompt_lookup``: proposes tokens that followed earlier occurrences of the last tokens in prompt and output. Needs no
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from autotune.drafters.draft import Proposals, check_vocabulary
from autotune.execution import EAGER
from autotune.modeling.prompt import Prompt, placeholders_of, rows_of
from autotune.trees.tree import ROOT, Ints, Tree

if TYPE_CHECKING:
    from autotune.modeling.target import Target


class PromptLookupDraft:
    """Proposes the followers of the longest n-gram that ends the context and occurs earlier in the committed tokens.

    A follower's probability is its share of that n-gram's occurrences; ties go to the most recent one. Rows with too few
    followers are filled with other tokens of probability 0.
    """

    kind = "prompt_lookup"

    def __init__(self, vocab_size: int, *, max_ngram: int = 3, placeholders: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.max_ngram = max_ngram
        self._placeholders = placeholders  # image placeholders, never proposed
        self.visual_keep = 1.0  # no effect
        self.aux_layers: tuple[int, ...] = ()
        self.mode = EAGER
        self.capture_sizes: tuple[int, ...] = ()  # no effect
        self._committed: list[int] = []
        # n-gram -> {follower: occurrences}, ordered by last occurrence. Updated with every committed token, so that no
        # round scans the text again.
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}

    def attach(self, target: Target) -> None:
        check_vocabulary(target, self.vocab_size)
        self._placeholders = placeholders_of(target.model.config)

    def use_mode(self, name: str) -> None:
        """No effect: there are no forward passes."""

    def prompts(self, inputs: dict[str, Any], target_prompts: Sequence[Prompt] = ()) -> list[list[int]]:
        return [row.tolist() for row in rows_of(inputs)]

    def prefill(self, prompt: list[int], visual_scores: Tensor | None, *, capacity: int) -> None:
        self._committed = []
        self._followers = {}
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        """Index a committed token as the follower of the tokens before it."""
        if token not in self._placeholders:
            for length in range(1, min(self.max_ngram, len(self._committed)) + 1):
                counts = self._followers.setdefault(tuple(self._committed[-length:]), {})
                counts[token] = counts.pop(token, 0) + 1  # reinserted at the end
        self._committed.append(token)

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int) -> Proposals:
        tokens = np.zeros((len(frontier), num_proposals), np.int32)
        logprobs = np.full((len(frontier), num_proposals), -np.inf, np.float32)
        for row, node in enumerate(frontier):
            followers = self._followers_of(self._last_tokens(tree, int(node)))
            total = sum(followers.values())
            # The sort is stable, so ties stay ordered by recency.
            best = sorted(reversed(followers.items()), key=lambda item: -item[1])[:num_proposals]
            logprobs[row, : len(best)] = [np.log(count / total) for _, count in best]
            tokens[row] = self._filled([token for token, _ in best], num_proposals)
        return tokens, logprobs

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        for node in path:
            self.append(int(tree.token[node]))
        self.append(next_token)

    def _last_tokens(self, tree: Tree, node: int) -> tuple[int, ...]:
        """Up to ``max_ngram`` tokens that end with the node; the root is the last committed token."""
        path: list[int] = []
        while node != ROOT and len(path) < self.max_ngram:
            path.append(int(tree.token[node]))
            node = int(tree.parent[node])
        start = max(0, len(self._committed) - (self.max_ngram - len(path)))
        return (*self._committed[start:], *reversed(path))

    def _followers_of(self, context: tuple[int, ...]) -> dict[int, int]:
        """Followers of the longest suffix of the context that has any."""
        for start in range(len(context)):
            followers = self._followers.get(context[start:])
            if followers:
                return followers
        return {}

    def _filled(self, proposed: list[int], num_proposals: int) -> list[int]:
        """The proposals, then the first other tokens, because the tokens of a row must be valid and distinct."""
        taken = {*proposed, *self._placeholders}
        others = (token for token in range(self.vocab_size) if token not in taken)
        return proposed + [next(others) for _ in range(num_proposals - len(proposed))]
