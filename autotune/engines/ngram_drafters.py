"""Drafts of engines' speculation by n-grams, from tokens alone. Loads no torch.

Drafters follow the rules of llama-server b11434, with the state that it keeps from request to request, and of vLLM
0.32.0. They are called as in llama-server: ``begin`` after a prompt is read, ``draft`` before a forward pass,
``accept`` after a draft was verified.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence

from autotune.engines.served import Served

POOL_SLOTS, POOL_FACTOR = 1 << 22, 6364136223846793005
POOL_CHUNK = 32  # tokens after which a request's new n-grams enter the pool
POOR_DRAFTS = 5  # consecutive ones that empty the pool


class KnownRequest:
    """The tokens of a request, with tables of its n-grams that settings share.

    A drafter is given a ``length``: the server has read ``tokens[:length]``, and the next token is sampled and not yet
    read.
    """

    def __init__(self, answer: Served) -> None:
        self.answer = answer
        self.tokens = [*answer.prompt_tokens, *answer.tokens, *answer.beyond]
        self.prompt_length = len(answer.prompt_tokens)
        self._places: dict[int, dict[tuple[int, ...], list[int]]] = {}

    def places(self, n: int) -> dict[tuple[int, ...], list[int]]:
        """The starts of every n-gram, in their order."""
        if n not in self._places:
            places = self._places[n] = defaultdict(list)
            for start in range(len(self.tokens) - n + 1):
                places[tuple(self.tokens[start : start + n])].append(start)
        return self._places[n]


class Drafter(ABC):
    """A type with the state of a server; a new one keeps nothing."""

    ends_with_answer: bool = True
    """Whether a draft is cut to what the request may still generate, and the end of the answer accepted only as its
    last token.
    """

    def begin(self, request: KnownRequest) -> None:  # noqa: B027 - not every type has a state
        """Take note of a prompt."""

    @abstractmethod
    def draft(self, request: KnownRequest, length: int) -> list[int]:
        """The tokens after the next one, before they are cut to what the request may still generate."""

    def accept(self, accepted: int) -> None:  # noqa: B027
        """Take note of how much of the last draft, cut to what the request may still generate, was accepted."""


class SimpleDrafter(Drafter):
    """``ngram-simple``: the tokens after the latest earlier occurrence of the last n."""

    def __init__(self, n: int, m: int) -> None:
        self.n, self.m = n, m

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        n, m, start = self.n, self.m, length - self.n + 1
        if length <= n + m + 1:
            return []
        places = request.places(n)[tuple(request.tokens[start : length + 1])]
        before = bisect.bisect_left(places, start - 1)  # occurrences that begin two tokens earlier at least
        if before == 0 or places[before - 1] == 0:  # the first token of a prompt begins no occurrence
            return []
        draft = request.tokens[places[before - 1] + n : length][:m]
        return draft if len(draft) >= n else []


def slot_of(gram: Sequence[int]) -> int:
    """The slot of an n-gram in the pool of ``ngram-mod``: a polynomial of its tokens."""
    value = 0
    for token in gram:
        value = value * POOL_FACTOR + token
    return value % POOL_SLOTS  # a divisor of 2^64, at which the engine's own value wraps


class ModDrafter(Drafter):
    """``ngram-mod``: a pool of hashed n-grams with the token after each, of all requests, until five poor drafts empty
    it.
    """

    def __init__(self, n: int, n_min: int, n_max: int) -> None:
        self.n, self.n_min, self.n_max = n, n_min, n_max
        self.pool: dict[int, int] = {}
        self.poor = self.entered = self.drafted = 0

    def _enter(self, request: KnownRequest, end: int) -> None:
        for start in range(self.entered, end):
            self.pool[slot_of(request.tokens[start : start + self.n])] = request.tokens[start + self.n]
        self.entered = end

    def begin(self, request: KnownRequest) -> None:
        self.entered = self.drafted = 0
        if request.prompt_length >= self.n:
            self._enter(request, request.prompt_length - self.n)
            if len(self.pool) > POOL_SLOTS / 4:
                self.pool.clear()

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        n, self.drafted = self.n, 0
        if length < n:
            return []
        if self.entered + POOL_CHUNK < length:
            self._enter(request, length - n)
        window = request.tokens[length - n + 1 : length + 1]
        while len(window) - n < self.n_max and (token := self.pool.get(slot_of(window[-n:]))) is not None:
            window.append(token)
        if len(window) - n < min(self.n_min, self.n_max):
            return []
        self.drafted = len(window) - n
        return window[n:]

    def accept(self, accepted: int) -> None:
        # Against the draft before it is cut to what the request may still generate.
        self.poor = self.poor + 1 if accepted < 0.25 * self.drafted else 0
        if self.poor >= POOR_DRAFTS:
            self.pool.clear()
            self.poor = self.entered = 0


class LookupDrafter(Drafter):
    """vLLM's ``ngram``: the tokens after the earliest occurrence of the longest n-gram that ends here; without a state.
    Drafts reach beyond the end of the answer.
    """

    ends_with_answer = False

    def __init__(self, shortest: int, longest: int, most: int) -> None:
        self.shortest, self.longest, self.most = shortest, longest, most

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        for n in range(min(self.longest, length), self.shortest - 1, -1):
            start = length + 1 - n
            first = request.places(n)[tuple(request.tokens[start : length + 1])][0]
            if first < start:
                return request.tokens[first + n : min(first + n + self.most, length + 1)]
        return []
