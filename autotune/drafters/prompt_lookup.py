"""``prompt_lookup``: what followed earlier occurrences of the last tokens, in prompt and output. No model: the free
baseline.
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
    """Proposes the followers of the longest n-gram that ends the context and has occurred before in what is committed.

    A follower's probability is its share of that n-gram's occurrences; of equal ones the most recent comes first. Rows
    with fewer followers than asked for are filled with other tokens of probability 0.
    """

    kind = "prompt_lookup"

    def __init__(self, vocab_size: int, *, max_ngram: int = 3, placeholders: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.max_ngram = max_ngram
        self._placeholders = placeholders  # fill the prompt where an image stands, and are never said
        self.visual_keep = 1.0  # taken from whoever sets it, and of no effect: no pixel is looked at
        self.aux_layers: tuple[int, ...] = ()
        self.mode = EAGER
        self.capture_sizes: tuple[int, ...] = ()  # the same: there is no forward to round up
        self._committed: list[int] = []
        # n-gram -> {follower: occurrences}, the follower seen last at the end. Grows by max_ngram entries with every
        # committed token, so that no round scans the text again.
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}

    def attach(self, target: Target) -> None:
        """Learn which tokens stand for images.

        Raises:
            UserError: a vocabulary of another size.
        """
        check_vocabulary(target, self.vocab_size)
        self._placeholders = placeholders_of(target.model.config)

    def use_mode(self, name: str) -> None:
        """No forward, no runner."""

    def prompts(self, inputs: dict[str, Any], read: Sequence[Prompt] = ()) -> list[list[int]]:
        """The tokens of each row."""
        return [row.tolist() for row in rows_of(inputs)]

    def prefill(self, prompt: list[int], visual_scores: Tensor | None, *, capacity: int) -> None:
        """Index the prompt."""
        self._committed = []
        self._followers = {}
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        """Index a committed token as the follower of what stands before it."""
        if token not in self._placeholders:
            for length in range(1, min(self.max_ngram, len(self._committed)) + 1):
                counts = self._followers.setdefault(tuple(self._committed[-length:]), {})
                counts[token] = counts.pop(token, 0) + 1  # put in anew: last
        self._committed.append(token)

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int) -> Proposals:
        """The most frequent followers of each node's last tokens."""
        tokens = np.zeros((len(frontier), num_proposals), np.int32)
        logprobs = np.full((len(frontier), num_proposals), -np.inf, np.float32)
        for row, node in enumerate(frontier):
            followers = self._followers_of(self._last_tokens(tree, int(node)))
            total = sum(followers.values())
            # Sorting keeps the order of equals, which is that of recency.
            best = sorted(reversed(followers.items()), key=lambda item: -item[1])[:num_proposals]
            logprobs[row, : len(best)] = [np.log(count / total) for _, count in best]
            tokens[row] = self._filled([token for token, _ in best], num_proposals)
        return tokens, logprobs

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        """Index the accepted nodes and the target's own token after them."""
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
        """Those of the longest end of the context that has any."""
        for start in range(len(context)):
            followers = self._followers.get(context[start:])
            if followers:
                return followers
        return {}

    def _filled(self, proposed: list[int], num_proposals: int) -> list[int]:
        """The proposals, and then the first other tokens: a row must not hold a token twice, nor one that is none."""
        taken = {*proposed, *self._placeholders}
        others = (token for token in range(self.vocab_size) if token not in taken)
        return proposed + [next(others) for _ in range(num_proposals - len(proposed))]
