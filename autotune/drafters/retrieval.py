"""``retrieval``: proposes what followed earlier occurrences of the last tokens in prompt and output. Needs no model.
Prompt lookup is its setting with matches of at most three tokens.

Its index finds what followed the longest match of a context's end. Positions with equal hashes of the token before them
form a chain, most recent first, as in deflate (RFC 1951, section 4). Every position of a chain is compared token by
token, so that hash collisions cost time and nothing else. Appending a token takes constant time and no allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from autotune.drafters.draft import Proposals
from autotune.drafters.token_draft import TokenDraft
from autotune.modeling.prompt import placeholders_of
from autotune.modeling.target import Target
from autotune.trees.limits import MAX_MATCH, MAX_RETRIEVED
from autotune.trees.tree import Ints, Retrieved

FIRST_CAPACITY = 1024  # tokens; doubled when they are in use
MAX_CANDIDATES = 4096  # positions of a chain that are compared, the most recent ones
TIMED_PERIOD = 48  # tokens after which the text repeats whose lookups are timed
_END = -1  # of a chain
_MULTIPLIER = 6364136223846793005  # Knuth's, of MMIX

Bools = NDArray[np.bool_]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Text = tuple[Int32s, Int32s, Int32s, Bools]
"""Tokens, the previous position of each one's chain, the newest position of each chain, and ``is_excluded``."""


class RetrievalDraft(TokenDraft):
    """Proposes the followers of the longest match of the context's last tokens in the tokens before.

    A follower's probability is its share of the occurrences of that match; ties go to the most recent one. Placeholders
    of images are never proposed. Where nothing matches, nothing is proposed, and a round is a plain step. Shares of
    occurrences are not coupled to the target's sampling.

    Args:
        max_match: tokens that are compared, at least 1.
    """

    kind = "retrieval"
    length = 0

    def __init__(self, *, max_match: int = MAX_MATCH) -> None:
        self.max_match = max_match
        self._target: Target | None = None

    def attach(self, target: Target) -> None:
        """See ``Draft``. Any vocabulary will do: only tokens that occurred are proposed."""
        if self._target is target:
            return
        size = target.vocab_size
        self._target, self.vocab_size, self._is_excluded = target, size, np.zeros(size, np.bool_)
        self._is_excluded[[token for token in placeholders_of(target.model.config) if token < size]] = True
        # A context, and the followers of its matches: tokens, counts, and for each token its index among them.
        follower, count = np.zeros((2, MAX_CANDIDATES), np.int32)
        self._scratch = np.zeros(self.max_match, np.int32), follower, count, np.zeros(size, np.int32)
        self._allocate(FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens, at 12 to 16 bytes each."""
        self._tokens, self._previous = np.zeros((2, capacity), np.int32)
        self._newest = np.full(1 << (capacity - 1).bit_length(), _END, np.int32)
        self.length = 0

    @property
    def _text(self) -> Text:
        return self._tokens, self._previous, self._newest, self._is_excluded

    def reserve(self, num_tokens: int) -> None:
        """Remove the request's tokens. The index grows when it must."""
        self._newest.fill(_END)
        self.length = 0

    def prefill(self, prompt: Ints, visual_scores: Tensor | None, *, capacity: int) -> None:
        """Index a prompt."""
        self.reserve(len(prompt))
        self.extend(prompt)

    def extend(self, tokens: Sequence[int] | Ints) -> None:
        new, end = np.array(tokens, np.int32), self.length + len(tokens)
        if end > len(self._tokens):
            new = np.concatenate([self._tokens[: self.length], new])
            self._allocate(2 * end)
        _append(self._text, self.length, new)
        self.length = end

    def propose_at(self, token: Ints, parent: Ints, nodes: Ints, num_visible: Ints, num_proposals: int) -> Proposals:
        """See ``TokenDraft``. Of equally frequent followers the most recent one comes first. Where fewer tokens follow,
        the others are absent: token -1 with probability 0.
        """
        tokens = np.empty((len(nodes), num_proposals), np.int32)
        logprobs = np.empty((len(nodes), num_proposals), np.float32)
        out = tokens, logprobs, np.empty(len(nodes), np.int32)
        _find_followers(self._text, token, parent, nodes, num_visible, self._scratch, *out)
        return tokens, logprobs

    def continuation(self) -> Retrieved:
        """The most frequent follower of the longest match of the text's end, then that of the match which it continues,
        and so on, up to ``MAX_RETRIEVED`` tokens.
        """
        tokens = np.full(MAX_RETRIEVED, -1)
        match_length = _find_continuation(self._text, self.length, self._scratch, tokens)
        return Retrieved(tokens, match_length)

    def prepare_step(self, kv_length: int, *, num_pending: int = 0) -> None:
        """Index a text of ``kv_length`` tokens that repeats itself, so that a timed lookup finds matches. No token is
        pending.
        """
        if self.length != kv_length:
            self.reserve(kv_length)
            self.extend(np.arange(-kv_length, 0) % min(TIMED_PERIOD, self.vocab_size))


@njit(cache=True)
def _bucket(token: int, num_buckets: int) -> int:
    return int((((np.int64(token) + 1) * _MULTIPLIER) >> 32) & (num_buckets - 1))


@njit(cache=True)
def _append(text: Text, length: int, new: Int32s) -> None:
    tokens, previous, newest, is_excluded = text
    for token in new:
        tokens[length] = token
        if length > 0 and not is_excluded[token]:
            bucket = _bucket(tokens[length - 1], len(newest))
            previous[length] = newest[bucket]
            newest[bucket] = length
        length += 1


@njit(cache=True)
def _find_followers(
    text: Text,
    drafted: Ints,
    parent: Ints,
    nodes: Ints,
    visible: Ints,
    scratch: tuple[Int32s, Int32s, Int32s, Int32s],
    out_tokens: Int32s,
    out_logprobs: Float32s,
    out_match_length: Int32s,
) -> None:
    tokens, previous, newest, _ = text
    context, follower, count, index_of = scratch
    max_match = len(context)
    for row in range(len(nodes)):
        # The context from its end backwards.
        node, size, at = nodes[row], 0, visible[row] - 1
        while size < max_match and parent[node] >= 0:
            context[max_match - 1 - size] = drafted[node]
            node = parent[node]
            size += 1
        while size < max_match and at >= 0:
            context[max_match - 1 - size] = tokens[at]
            at -= 1
            size += 1
        longest = num_followers = total = 0
        if size > 0:
            position = newest[_bucket(context[max_match - 1], len(newest))]
            num_candidates = 0
            while position >= 0 and num_candidates < MAX_CANDIDATES:
                if position >= visible[row]:
                    position = previous[position]
                    continue
                num_candidates += 1
                length = 0
                while (
                    length < size
                    and length < position
                    and tokens[position - 1 - length] == context[max_match - 1 - length]
                ):
                    length += 1
                if length > longest:
                    longest, num_followers, total = length, 0, 0
                if length == longest and length > 0:
                    token = tokens[position]
                    index = index_of[token]
                    if index >= num_followers or follower[index] != token:
                        index = num_followers
                        index_of[token], follower[index], count[index] = index, token, 0
                        num_followers += 1
                    count[index] += 1
                    total += 1
                position = previous[position]
        out_match_length[row] = longest
        _take_most_frequent(follower, count, num_followers, total, out_tokens[row], out_logprobs[row])


@njit(cache=True)
def _find_continuation(text: Text, length: int, scratch: tuple[Int32s, Int32s, Int32s, Int32s], out: Ints) -> int:
    """Write the tokens of ``RetrievalDraft.continuation``; returns the length of the first match."""
    drafted, parent = np.zeros(len(out) + 1, np.int64), np.arange(-1, len(out))
    visible, match_length = np.full(1, length), 0
    found, logprob, found_length = np.empty((1, 1), np.int32), np.empty((1, 1), np.float32), np.empty(1, np.int32)
    for step in range(len(out)):
        node = parent[step + 1 : step + 2]
        _find_followers(text, drafted, parent, node, visible, scratch, found, logprob, found_length)
        if logprob[0, 0] == -np.inf:
            break
        out[step] = drafted[step + 1] = found[0, 0]
        if step == 0:
            match_length = found_length[0]
    return match_length


@njit(cache=True)
def _take_most_frequent(
    follower: Int32s, count: Int32s, num_followers: int, total: int, tokens: Int32s, logprobs: Float32s
) -> None:
    """Write the most frequent followers, the first of equal ones first, and their shares."""
    tokens[:], logprobs[:] = -1, -np.inf
    order = np.argsort(-count[:num_followers], kind="mergesort")
    for rank in range(min(len(tokens), num_followers)):
        tokens[rank] = follower[order[rank]]
        logprobs[rank] = np.log(count[order[rank]] / total)
