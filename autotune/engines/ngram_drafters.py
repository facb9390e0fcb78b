"""Drafts of engines' speculation: n-grams from tokens alone, and a draft model's from the rounds of a longer chain.
Loads no torch.

Drafters follow the rules of llama-server b11434, with the state that it keeps from request to request, and of vLLM
0.32.0. They are called as in llama-server: ``begin`` after a prompt is read, ``draft`` before a forward pass,
``accept`` after a draft was verified.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.documents.engine_profile import ServedAnswer

MAP_SLOTS, MAP_FACTOR = 1 << 18, 2654435761
MAP_VALUES = 4  # continuations that a key of map-k4v counts
MAP_COUNT = 16380  # the largest count
POOL_SLOTS, POOL_FACTOR = 1 << 22, 6364136223846793005
POOL_CHUNK = 32  # tokens after which a request's new n-grams enter the pool
POOR_DRAFTS = 5  # consecutive ones that empty the pool
CACHE_LONGEST, CACHE_DRAFT = 4, 8
# Occurrences, and per cent of the most frequent token, by length of the n-gram.
CACHE_LEAST = ((2, 66), (2, 50), (1, 50), (1, 50))
BUCKETS = (13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229)


@dataclass
class Grams:
    """The n-grams of a request: a number for each start, the starts by number, and the start of the latest equal n-gram
    that begins at least two tokens before, from token 1 on, or 0.
    """

    ids: list[int] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)


class KnownRequest:
    """The tokens of a request, with tables of its n-grams that settings share.

    A drafter is given a ``length``: the server has read ``tokens[:length]``, and the next token is sampled and not yet
    read.
    """

    def __init__(self, answer: ServedAnswer) -> None:
        self.answer = answer
        self.tokens = [*answer.prompt_tokens, *answer.tokens, *answer.beyond]
        self.prompt_length = len(answer.prompt_tokens)
        self._grams: dict[int, Grams] = {}
        self._hashes: dict[tuple[int, int, int], list[int]] = {}

    @functools.cached_property
    def is_drafted(self) -> list[bool]:
        """Whether a draft model proposes each token after those before it. A round shows it of its accepted tokens and
        of the next one, unless all were accepted; then, and beyond the rounds, tokens count as proposed.
        """
        found, place = [True] * len(self.tokens), self.prompt_length
        for drafted, accepted in self.answer.rounds:
            place += accepted + 1
            if place < len(found):
                found[place] = accepted == drafted
        return found

    def grams(self, n: int) -> Grams:
        if n not in self._grams:
            grams = self._grams[n] = Grams()
            numbers: dict[tuple[int, ...], int] = {}
            for start in range(len(self.tokens) - n + 1):
                number = numbers.setdefault(tuple(self.tokens[start : start + n]), len(numbers))
                if number == len(grams.places):
                    grams.places.append([])
                before = next((at for at in reversed(grams.places[number][-3:]) if 0 < at < start - 1), 0)
                grams.ids.append(number)
                grams.places[number].append(start)
                grams.earlier.append(before)
        return self._grams[n]

    def hashes(self, n: int, factor: int, slots: int) -> list[int]:
        """Hashes of the n-grams by start: polynomials of the tokens, modulo a power of two."""
        if (key := (n, factor, slots)) not in self._hashes:
            tokens, count = np.array(self.tokens, np.uint64), max(0, len(self.tokens) - n + 1)
            values = np.zeros(count, np.uint64)
            for k in range(n):  # wraps at 2^64, of which every number of slots is a divisor
                values = values * np.uint64(factor) + tokens[k : k + count]
            self._hashes[key] = (values % np.uint64(slots)).tolist()
        return self._hashes[key]


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
        n, m = self.n, self.m
        if length <= n + m + 1 or not (found := request.grams(n).earlier[length - n + 1]):
            return []
        first, count = found + n, min(m, length - found - n)
        return request.tokens[first : first + count] if count >= n else []


@dataclass
class _Value:
    """A continuation of a key: its place (0: unused), how often it occurred, and how much of it was accepted last."""

    place: int
    count: int
    accepted: int


@dataclass
class _Key:
    place: int
    values: list[_Value]
    hits: int = 0
    counted_to: int = 0


class MapDrafter(Drafter):
    """``ngram-map-k``, and with ``min_hits`` ``ngram-map-k4v``.

    Keys and places outlive a request, and mean the tokens at these places of the next one. A key drafts at most what
    was accepted of it last time, so that 0 ends it.
    """

    def __init__(self, n: int, m: int, min_hits: int | None = None) -> None:
        self.n, self.m, self.min_hits = n, m, min_hits
        self.keys: list[_Key] = []
        self.by_id: dict[int, int] = {}
        self.table: dict[int, int] = {}
        self.table_end = self.checked = self.begun = 0
        self.last: _Value | None = None

    def begin(self, request: KnownRequest) -> None:
        size, first = request.prompt_length, self.begun
        if first > size:
            first = max(0, size - self.n - self.m)
        if size < self.checked:
            self.table = {slot: place for slot, place in self.table.items() if place < first}
            self.table_end = max(0, first - 1)
            self.keys = [key for key in self.keys if key.place < first and self._keeps_values(key, first)]
        self.checked = self.begun = size
        ids = request.grams(self.n).ids
        self.by_id = {}
        for number, key in enumerate(self.keys):
            if key.place < len(ids):
                self.by_id.setdefault(ids[key.place], number)

    def _keeps_values(self, key: _Key, first: int) -> bool:
        """Drop a key's continuations from ``first`` on; whether one is left, or none is needed."""
        for index in reversed(range(MAP_VALUES)) if self.min_hits is not None else ():
            if key.values[index].place >= max(1, first):
                key.values.append(_Value(0, 0, key.values[-1].accepted))
                del key.values[index]
        return self.min_hits is None or key.values[0].place != 0

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        n, m = self.n, self.m
        self.last = None
        if length < 2 * n + m:
            return []
        self.checked = length
        ids, slots = request.grams(n).ids, request.hashes(n, MAP_FACTOR, MAP_SLOTS)
        start, end = length - n + 1, length - n - m - 1
        wanted, found = ids[start], self.table.get(slots[start], 0)
        first_new = max(self.begun, self.table_end)
        news = [*range(self.begun - n - m - 1, self.table_end, -1), *range(end, first_new, -1)]
        if not (0 < found < end and ids[found] == wanted):
            found = next((place for place in news if ids[place] == wanted), 0)
        for place in news:
            self.table.setdefault(slots[place], place)
        self.table_end = max(self.table_end, end)
        if not found:
            return []
        number = self.by_id.setdefault(wanted, len(self.keys))
        if number == len(self.keys):
            self.keys.append(_Key(found, [_Value(0, 0, m) for _ in range(MAP_VALUES)]))
        key = self.keys[number]
        key.hits = min(key.hits + 1, MAP_COUNT)
        value = key.values[0]
        if self.min_hits is not None:
            if key.hits < self.min_hits:
                return []
            self._count(key, request, wanted, found)
            value = max(key.values, key=lambda one: one.count)  # the first of equal ones
            if value.count < 2 * (sum(one.count for one in key.values) - value.count):
                return []
        self.last = value
        return request.tokens[found + n : found + n + min(m, value.accepted)]

    def _count(self, key: _Key, request: KnownRequest, wanted: int, found: int) -> None:
        """Count a key's continuations up to the occurrence ``found``; the one counted last is counted again."""
        tokens, m = request.tokens, self.m
        for place in request.grams(self.n).places[wanted]:
            first = place + self.n
            for value in key.values if key.counted_to <= place <= found else ():
                if value.place == 0:
                    value.place, value.accepted = first, m
                elif tokens[first : first + m] != tokens[value.place : value.place + m]:
                    continue
                value.count = min(value.count + 1, MAP_COUNT)
                break
        key.counted_to = found

    def accept(self, accepted: int) -> None:
        if self.last is not None:
            self.last.accepted = accepted


class ModDrafter(Drafter):
    """``ngram-mod``: a pool of hashed n-grams with the token after each, of all requests, until five poor drafts empty
    it.
    """

    def __init__(self, n: int, n_min: int, n_max: int) -> None:
        self.n, self.n_min, self.n_max = n, n_min, n_max
        self.pool: dict[int, int] = {}
        self.poor = self.entered = self.drafted = 0
        self.leading = pow(POOL_FACTOR, n - 1, POOL_SLOTS)

    def _enter(self, request: KnownRequest, end: int) -> None:
        slots = request.hashes(self.n, POOL_FACTOR, POOL_SLOTS)[self.entered : end]
        self.pool.update(zip(slots, request.tokens[self.entered + self.n :], strict=False))
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
        start = length - n + 1
        window, slot = request.tokens[start : start + n], request.hashes(n, POOL_FACTOR, POOL_SLOTS)[start]
        while (drafted := len(window) - n) < self.n_max and (token := self.pool.get(slot)) is not None:
            slot = ((slot - window[drafted] * self.leading) * POOL_FACTOR + token) % POOL_SLOTS
            window.append(token)
        if drafted < min(self.n_min, self.n_max):
            return []
        self.drafted = drafted
        return window[n:]

    def accept(self, accepted: int) -> None:
        # Against the draft before it is cut to what the request may still generate.
        self.poor = self.poor + 1 if accepted < 0.25 * self.drafted else 0
        if self.poor >= POOR_DRAFTS:
            self.pool.clear()
            self.poor = self.entered = 0


class CacheDrafter(Drafter):
    """``ngram-cache`` without files: counts of tokens after n-grams, never cleared. Of a later prompt it reads only the
    tokens at places that no earlier request reached.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.size = 0

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        if self.size < length + 1:
            self._count(request.tokens[self.size : length + 1])
            self.size = length + 1
        draft: list[int] = []
        window = request.tokens[max(0, length + 1 - CACHE_LONGEST) : length + 1]
        while len(draft) < CACHE_DRAFT and (token := self._likely(tuple(window[-CACHE_LONGEST:]))) is not None:
            draft.append(token)
            window.append(token)
        return draft

    def _count(self, tokens: list[int]) -> None:
        """Count n-grams that lie within the new tokens: a pass that adds one token counts nothing."""
        for n in range(1, CACHE_LONGEST + 1):
            for end in range(n, len(tokens)):
                part = self.counts.setdefault(tuple(tokens[end - n : end]), {})
                part[tokens[end]] = part.get(tokens[end], 0) + 1

    def _likely(self, context: tuple[int, ...]) -> int | None:
        """The most frequent token after the longest n-gram that was seen often enough and is followed by it often
        enough.
        """
        for n in range(len(context), 0, -1):
            if part := self.counts.get(context[-n:]):
                most, seen = max(part.values()), sum(part.values())
                least, percent = CACHE_LEAST[n - 1]
                if seen >= least and 100 * most >= percent * seen:
                    return next(token for token in iterated(list(part)) if part[token] == most)
        return None


def iterated(tokens: Sequence[int]) -> list[int]:
    """The order in which GNU's ``std::unordered_map`` iterates over keys inserted in this order, by which ties are
    broken.

    A key enters at the front of its bucket, and an empty bucket at the front of all. When keys outgrow the buckets, all
    are inserted again in the order of iteration.
    """
    order: list[int] = []
    size = 0
    for count, token in enumerate(tokens):
        waiting = [token]
        if count in (0, *BUCKETS):
            size = next(one for one in BUCKETS if one > count)
            waiting, order = [*order, token], []
        for one in waiting:
            front = next((place for place, other in enumerate(order) if other % size == one % size), 0)
            order.insert(front, one)
    return order


class LookupDrafter(Drafter):
    """vLLM's ``ngram``: the tokens after the earliest occurrence of the longest n-gram that ends here; without a state.
    Drafts reach beyond the end of the answer.
    """

    ends_with_answer = False

    def __init__(self, shortest: int, longest: int, most: int) -> None:
        self.shortest, self.longest, self.most = shortest, longest, most

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        for n in range(min(self.longest, length), self.shortest - 1, -1):
            grams, start = request.grams(n), length + 1 - n
            if (first := grams.places[grams.ids[start]][0]) < start:
                return request.tokens[first + n : min(first + n + self.most, length + 1)]
        return []


class ChainDrafter(Drafter):
    """A draft model: k tokens, which are those of the answer up to the first that the model does not propose, then -1.
    Exact where a draft depends on the text alone; a head that reads states proposes a token less often at the end of a
    long chain.
    """

    def __init__(self, k: int, *, ends_with_answer: bool) -> None:
        self.k, self.ends_with_answer = k, ends_with_answer

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        places = range(length + 1, min(length + 1 + self.k, len(request.tokens)))
        right = list(itertools.takewhile(request.is_drafted.__getitem__, places))
        return [*(request.tokens[place] for place in right), *[-1] * (self.k - len(right))]
