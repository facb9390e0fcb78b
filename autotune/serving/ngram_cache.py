"""llama.cpp's ``ngram-cache``: counts of the tokens after n-grams of one to four tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.serving.ngram_replay import Request

LONGEST, DRAFT = 4, 8
LEAST_COUNTS = (2, 2, 1, 1)  # by length of the n-gram
LEAST_PERCENT = (66, 50, 50, 50)
BUCKETS = (13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229)


class CacheDrafter:
    """``ngram-cache`` without files: its counts are never cleared, and take of a later prompt only the tokens at places that no
    earlier request reached.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.size = 0

    def begin(self, request: Request) -> None:
        pass

    def draft(self, request: Request, length: int) -> list[int]:
        if self.size < length + 1:
            self._count(request.tokens[self.size : length + 1])
            self.size = length + 1
        if length + 1 < 2:
            return []
        # Shorter prompts than the longest n-gram read before the text; llama.cpp's result is undefined there.
        window = request.tokens[max(0, length + 1 - LONGEST) : length + 1]
        draft: list[int] = []
        while len(draft) < DRAFT and (token := self._likely(tuple(window[-LONGEST:]))) is not None:
            draft.append(token)
            window.append(token)
        return draft

    def accept(self, accepted: int) -> None:
        pass

    def _count(self, tokens: list[int]) -> None:
        """Count n-grams that lie within the new tokens: most passes add one token, and count nothing."""
        for n in range(1, LONGEST + 1):
            for end in range(n, len(tokens)):
                part = self.counts.setdefault(tuple(tokens[end - n : end]), {})
                part[tokens[end]] = part.get(tokens[end], 0) + 1

    def _likely(self, context: tuple[int, ...]) -> int | None:
        """The most frequent token after the longest n-gram that was seen often enough and agrees with itself."""
        for n in range(min(LONGEST, len(context)), 0, -1):
            part = self.counts.get(context[-n:])
            if part is None:
                continue
            most, seen = max(part.values()), sum(part.values())
            if seen >= LEAST_COUNTS[n - 1] and 100 * most >= LEAST_PERCENT[n - 1] * seen:
                tied = [token for token, count in part.items() if count == most]
                return tied[0] if len(tied) == 1 else next(token for token in iterated(part) if token in tied)
        return None


def iterated(tokens: Iterable[int]) -> list[int]:
    """The order in which GNU's ``std::unordered_map`` iterates over keys that were inserted in this order: it decides ties.

    A key enters at the front of its bucket, and a bucket that was empty at the front of all. When the keys outgrow the buckets, all
    are inserted again in the order of iteration.
    """
    sizes = iter(BUCKETS)
    size = next(sizes)
    order: list[int] = []
    for token in tokens:
        if len(order) == size:
            size = next(sizes)
            kept, order = order, []
            for one in kept:
                _insert(order, one, size)
        _insert(order, token, size)
    return order


def _insert(order: list[int], token: int, size: int) -> None:
    places = (place for place, other in enumerate(order) if other % size == token % size)
    first = next(places, None)
    order.insert(0 if first is None else first, token)
