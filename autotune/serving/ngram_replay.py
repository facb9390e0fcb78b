"""Replay of llama.cpp's n-gram speculation over answers that are known, from tokens alone. Loads no torch.

The drafters follow the rules of llama-server b11434, with the state that it keeps from request to request. Each is asked as the
server asks it: ``begin`` after a prompt is read, ``draft`` before a forward pass, and ``accept`` after the verification of a draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autotune.documents.engine_profile import ServedAnswer, Speculation, SpeculationCounts
from autotune.serving.ngram_cache import CacheDrafter

MAP_SLOTS = 1 << 18
MAP_FACTOR = 2654435761
MAP_VALUES = 4  # continuations that a key of map-k4v counts
MAP_COUNT = 16380  # largest count
POOL_SLOTS = 1 << 22
POOL_FACTOR = 6364136223846793005
POOL_CHUNK = 32  # tokens after which a request's new n-grams enter the pool
POOR_DRAFTS = 5  # consecutive ones that empty the pool


class Request:
    """The tokens of a request, with tables of its n-grams that settings share.

    A drafter is given ``length``: the server's history holds ``tokens[:length]``, and the token after it is sampled but not yet
    read. Drafters look at later tokens only through n-grams that end with the sampled one.
    """

    def __init__(self, answer: ServedAnswer) -> None:
        self.answer = answer
        self.tokens = [*answer.prompt_tokens, *answer.tokens]
        self.prompt_length = len(answer.prompt_tokens)
        self._ids: dict[int, list[int]] = {}
        self._earlier: dict[int, list[int]] = {}
        self._places: dict[int, list[list[int]]] = {}
        self._hashes: dict[tuple[int, int, int], list[int]] = {}

    def ids(self, n: int) -> list[int]:
        """Numbers of the n-grams by start: equal numbers are equal n-grams."""
        if n not in self._ids:
            numbers: dict[tuple[int, ...], int] = {}
            starts = range(len(self.tokens) - n + 1)
            self._ids[n] = [numbers.setdefault(tuple(self.tokens[i : i + n]), len(numbers)) for i in starts]
        return self._ids[n]

    def places(self, n: int) -> list[list[int]]:
        """Starts of each n-gram, ascending, by its number."""
        if n not in self._places:
            ids = self.ids(n)
            self._places[n] = [[] for _ in range(max(ids, default=-1) + 1)]
            for start, number in enumerate(ids):
                self._places[n][number].append(start)
        return self._places[n]

    def earlier(self, n: int) -> list[int]:
        """Start of the latest equal n-gram that begins at least two tokens before, by start; 0 if there is none after token 0."""
        if n not in self._earlier:
            last: dict[int, int] = {}
            ids = self.ids(n)
            self._earlier[n] = []
            for start in range(len(ids)):
                if start >= 3:
                    last[ids[start - 2]] = start - 2
                self._earlier[n].append(last.get(ids[start], 0))
        return self._earlier[n]

    def hashes(self, n: int, factor: int, slots: int) -> list[int]:
        """Hashes of the n-grams by start: polynomials of the tokens, modulo a power of two."""
        key = (n, factor, slots)
        if key not in self._hashes:
            tokens, count = np.array(self.tokens, np.uint64), max(0, len(self.tokens) - n + 1)
            values = np.zeros(count, np.uint64)
            for k in range(n):  # wraps at 2^64, of which every number of slots is a divisor
                values = values * np.uint64(factor) + tokens[k : k + count]
            self._hashes[key] = (values % np.uint64(slots)).tolist()
        return self._hashes[key]


class Drafter(Protocol):
    def begin(self, request: Request) -> None: ...

    def draft(self, request: Request, length: int) -> list[int]: ...

    def accept(self, accepted: int) -> None: ...


class SimpleDrafter:
    """``ngram-simple``: the tokens after the latest earlier occurrence of the last n; it keeps nothing."""

    def __init__(self, n: int, m: int) -> None:
        self.n, self.m = n, m

    def begin(self, request: Request) -> None:
        pass

    def draft(self, request: Request, length: int) -> list[int]:
        n, m = self.n, self.m
        if length <= n + m + 1 or not (found := request.earlier(n)[length - n + 1]):
            return []
        first, count = found + n, min(m, length - found - n)
        return request.tokens[first : first + count] if count >= n else []

    def accept(self, accepted: int) -> None:
        pass


@dataclass
class _Value:
    """A continuation of a key: its place (0: unused), how often it occurred, and how much of it was accepted last."""

    place: int
    count: int
    accepted: int


@dataclass
class _Key:
    place: int
    hits: int
    counted_to: int
    values: list[_Value]


class MapDrafter:
    """``ngram-map-k``, and ``ngram-map-k4v`` if ``min_hits`` is given.

    Keys, the table of n-grams and their places outlive a request, and mean the tokens at these places of the next one. A key drafts
    at most what was accepted of it last time, so that 0 ends it.
    """

    def __init__(self, n: int, m: int, min_hits: int | None = None) -> None:
        self.n, self.m, self.min_hits = n, m, min_hits
        self.keys: list[_Key] = []
        self.table: dict[int, int] = {}
        self.table_end = self.checked = self.begun = 0
        self.by_id: dict[int, int] = {}
        self.last: _Value | None = None

    def begin(self, request: Request) -> None:
        size, first = request.prompt_length, self.begun
        if first > size:
            first = max(0, size - self.n - self.m)
        if size < self.checked:
            self.table = {slot: place for slot, place in self.table.items() if place < first}
            self.table_end = max(0, first - 1)
            self.keys = [key for key in self.keys if key.place < first and self._keeps_values(key, first)]
        self.checked = self.begun = size
        ids = request.ids(self.n)
        self.by_id = {}
        for number, key in enumerate(self.keys):
            if key.place < len(ids):
                self.by_id.setdefault(ids[key.place], number)

    def _keeps_values(self, key: _Key, first: int) -> bool:
        """Drop the continuations from ``first`` on; whether one is left, or none is needed."""
        if self.min_hits is None:
            return True
        for index in reversed(range(MAP_VALUES)):
            if key.values[index].place >= max(1, first):
                dropped = key.values.pop(index)
                left = key.values[-1] if index < MAP_VALUES - 1 else dropped
                key.values.append(_Value(0, 0, left.accepted))
        return key.values[0].place != 0

    def draft(self, request: Request, length: int) -> list[int]:
        n, m, begun = self.n, self.m, self.begun
        self.last = None
        if length < 2 * n + m:
            return []
        self.checked = length
        ids, slots = request.ids(n), request.hashes(n, MAP_FACTOR, MAP_SLOTS)
        start, end = length - n + 1, length - n - m - 1
        wanted, found = ids[start], 0
        place = self.table.get(slots[start], 0)
        if 0 < place < end and ids[place] == wanted:
            found = place
        news = [*range(begun - n - m - 1, self.table_end, -1), *range(end, max(begun, self.table_end), -1)]
        if not found:
            found = next((place for place in news if ids[place] == wanted), 0)
        for place in news:
            self.table.setdefault(slots[place], place)
        self.table_end = max(self.table_end, end)
        if not found:
            return []
        number = self.by_id.setdefault(wanted, len(self.keys))
        if number == len(self.keys):
            self.keys.append(_Key(found, 0, 0, [_Value(0, 0, m) for _ in range(MAP_VALUES)]))
        key = self.keys[number]
        key.hits = min(key.hits + 1, MAP_COUNT)
        value = key.values[0]
        if self.min_hits is not None:
            if key.hits < self.min_hits:
                return []
            self._count(key, request, wanted, found)
            value = max(key.values, key=lambda one: one.count)  # the first of equal ones
            others = sum(one.count for one in key.values) - value.count
            if others and value.count < 2 * others:
                return []
        self.last = value
        first = found + n
        return request.tokens[first : first + min(m, value.accepted)]

    def _count(self, key: _Key, request: Request, wanted: int, found: int) -> None:
        """Count the continuations of a key up to the occurrence ``found``; the one counted last is counted again."""
        tokens, n, m = request.tokens, self.n, self.m
        for place in request.places(n)[wanted]:
            if not key.counted_to <= place <= found:
                continue
            first = place + n
            for value in key.values:
                if value.place == 0:
                    value.place, value.count, value.accepted = first, 0, m
                elif tokens[first : first + m] != tokens[value.place : value.place + m]:
                    continue
                value.count = min(value.count + 1, MAP_COUNT)
                break
        key.counted_to = found

    def accept(self, accepted: int) -> None:
        if self.last is not None:
            self.last.accepted = accepted


class ModDrafter:
    """``ngram-mod``: a pool of hashed n-grams with the token after each, shared by all requests until five poor drafts empty it."""

    def __init__(self, n: int, n_min: int, n_max: int) -> None:
        self.n, self.n_min, self.n_max = n, n_min, n_max
        self.pool: dict[int, int] = {}
        self.poor = self.entered = self.drafted = 0
        self.leading = pow(POOL_FACTOR, n - 1, POOL_SLOTS)

    def _enter(self, request: Request, first: int, end: int) -> None:
        slots = request.hashes(self.n, POOL_FACTOR, POOL_SLOTS)[first:end]
        self.pool.update(zip(slots, request.tokens[first + self.n :], strict=False))

    def begin(self, request: Request) -> None:
        self.entered = self.drafted = 0
        if (end := request.prompt_length - self.n) >= 0:
            self._enter(request, 0, end)
            self.entered = end
            if len(self.pool) > POOL_SLOTS / 4:
                self.pool.clear()

    def draft(self, request: Request, length: int) -> list[int]:
        n = self.n
        self.drafted = 0
        if length < n:
            return []
        if self.entered + POOL_CHUNK < length:
            self._enter(request, self.entered, length - n)
            self.entered = length - n
        start = length - n + 1
        window = request.tokens[start : start + n]
        slot = request.hashes(n, POOL_FACTOR, POOL_SLOTS)[start]
        for index in range(self.n_max):
            token = self.pool.get(slot)
            if token is None:
                if index < self.n_min:
                    return []
                break
            slot = ((slot - window[index] * self.leading) * POOL_FACTOR + token) % POOL_SLOTS
            window.append(token)
        self.drafted = len(window) - n
        return window[n:]

    def accept(self, accepted: int) -> None:
        if not self.drafted:
            return
        # Measured against the draft before it is cut to what the request may still generate.
        self.poor = self.poor + 1 if accepted / self.drafted < 0.25 else 0
        if self.poor >= POOR_DRAFTS:
            self.pool.clear()
            self.poor = self.entered = 0


class FirstDrafter:
    """Several types in one server: the first draft that is not empty is verified, and its drafter alone is told the outcome."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters, self.last = drafters, drafters[0]

    def begin(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.begin(request)

    def draft(self, request: Request, length: int) -> list[int]:
        for drafter in self.drafters:
            if draft := drafter.draft(request, length):
                self.last = drafter
                return draft
        return []

    def accept(self, accepted: int) -> None:
        self.last.accept(accepted)


def drafter_of(speculation: Speculation) -> Drafter:
    """A drafter in the state of a new server."""
    values = tuple(speculation.options.values())
    match speculation.type:
        case "ngram-simple":
            return SimpleDrafter(*values)
        case "ngram-map-k" | "ngram-map-k4v":
            return MapDrafter(*values)
        case "ngram-mod":
            return ModDrafter(*values)
        case "ngram-cache":
            return CacheDrafter()


@dataclass(frozen=True)
class RequestReplay:
    """Forward passes of one request after its prompt."""

    drafts: list[tuple[int, int]]
    """Draft tokens and accepted ones of each verification of a draft."""
    steps: Counter[tuple[int, int]]
    """Number of forward passes by tokens read, and by tokens before them in units of ``CONTEXT_STEP``."""
    num_tokens: int
    """Tokens of the answer after the first, which the prompt gives."""

    @property
    def counts(self) -> SpeculationCounts:
        drafted, accepted = (sum(column) for column in zip(*self.drafts, strict=True)) if self.drafts else (0, 0)
        return SpeculationCounts(verifications=len(self.drafts), drafted=drafted, accepted=accepted)


CONTEXT_STEP = 32


def replay_request(drafter: Drafter, request: Request, context: int) -> RequestReplay:
    """Replay one request, and leave the drafter in the state that the server has after it.

    Args:
        context: of a slot, in tokens; a draft is cut to it and to what the request may still generate.
    """
    answer, tokens = request.answer, request.tokens
    drafter.begin(request)
    drafts: list[tuple[int, int]] = []
    steps: Counter[tuple[int, int]] = Counter()
    length, end = request.prompt_length, len(tokens) - 1  # the token at ``length`` is sampled and not yet read
    while length < end:
        generated = length - request.prompt_length + 1
        room = min(context - length - 2, answer.limit - generated - 1)
        draft = drafter.draft(request, length)[:room] if room > 0 else []
        steps[len(draft) + 1, length // CONTEXT_STEP] += 1
        accepted = 0
        for index, token in enumerate(draft):
            at = length + 1 + index
            is_end = answer.is_ended and at == end and index + 1 < len(draft)  # nothing is accepted after it
            if token != tokens[at] or is_end:
                break
            accepted += 1
            if at == end:
                break
        if draft:
            drafts.append((len(draft), accepted))
            drafter.accept(accepted)
        length += accepted + 1
    return RequestReplay(drafts, steps, len(answer.tokens) - 1)


def replay(
    speculations: Iterable[Speculation], requests: Sequence[Request], context: int, *, is_cleared: bool = False
) -> list[RequestReplay]:
    """Replay requests in their order, in one server of one or several types that keeps its state, or with ``is_cleared`` in a
    new server for each.
    """
    chosen = list(speculations)

    def new() -> Drafter:
        return FirstDrafter([drafter_of(one) for one in chosen])

    server, results = new(), []
    for request in requests:
        results.append(replay_request(new() if is_cleared else server, request, context))
    return results


def total(counts: Iterable[SpeculationCounts]) -> SpeculationCounts:
    rows = [(one.verifications, one.drafted, one.accepted) for one in counts] or [(0, 0, 0)]
    verifications, drafted, accepted = (sum(column) for column in zip(*rows, strict=True))
    return SpeculationCounts(verifications=verifications, drafted=drafted, accepted=accepted)
