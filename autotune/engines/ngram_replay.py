"""Replay of an engine's speculation over known answers: passes, drafts and what is accepted of them. Loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from autotune.documents.engine_profile import ModelType, ServedAnswer, Speculation, SpeculationCounts
from autotune.engines.ngram_drafters import (
    CacheDrafter,
    ChainDrafter,
    Drafter,
    KnownRequest,
    LookupDrafter,
    MapDrafter,
    ModDrafter,
    SimpleDrafter,
)
from autotune.engines.suffix_drafter import SuffixDrafter

CONTEXT_STEP = 32


class FirstDrafter(Drafter):
    """Several types in one server: the first draft that is not empty is verified, and its drafter alone is told the
    outcome.
    """

    def __init__(self, speculations: Iterable[Speculation]) -> None:
        self.drafters = [DRAFTERS[one.type](*one.options.values()) for one in speculations]
        self.ends_with_answer = all(one.ends_with_answer for one in self.drafters)
        self.has_model = any(isinstance(one, ChainDrafter) for one in self.drafters)
        self.last: Drafter | None = None

    def begin(self, request: KnownRequest) -> None:
        for drafter in self.drafters:
            drafter.begin(request)

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        for drafter in self.drafters:
            if draft := drafter.draft(request, length):
                self.last = drafter
                return draft
        return []

    def accept(self, accepted: int) -> None:
        if self.last is not None:
            self.last.accept(accepted)


DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "ngram-simple": SimpleDrafter,
    "ngram-map-k": MapDrafter,
    "ngram-map-k4v": MapDrafter,
    "ngram-mod": ModDrafter,
    "ngram-cache": CacheDrafter,
    "ngram": LookupDrafter,
    "suffix": SuffixDrafter,
    **{one: partial(ChainDrafter, ends_with_answer=one.startswith("draft-")) for one in get_args(ModelType)},
}


@dataclass(frozen=True)
class RequestReplay:
    """Forward passes of one request after its prompt."""

    drafts: list[tuple[int, int]]
    """Draft tokens and accepted ones of each verification."""
    steps: Counter[tuple[int, int]]
    """Number of forward passes by tokens read, and by tokens before them in units of ``CONTEXT_STEP``."""
    num_tokens: int
    """Tokens of the answer after the first, which the prompt gives."""
    has_model: bool = False
    """Whether a draft model drafts."""

    @property
    def counts(self) -> SpeculationCounts:
        drafted, accepted = (sum(row[index] for row in self.drafts) for index in (0, 1))
        return SpeculationCounts(verifications=len(self.drafts), drafted=drafted, accepted=accepted)


Replayed = tuple[ServedAnswer, RequestReplay]


def replay_request(drafter: FirstDrafter, request: KnownRequest, context: int) -> RequestReplay:
    """Replay one request, and leave the drafter in the state that the server has after it.

    Args:
        context: most tokens of a request, to which a draft is cut.
    """
    answer, tokens = request.answer, request.tokens
    drafter.begin(request)
    drafts, steps = [], Counter[tuple[int, int]]()
    length, ends = request.prompt_length, drafter.ends_with_answer
    end = length + len(answer.tokens) - 1
    while length < end:
        room = min(context - length, request.prompt_length + answer.limit - length if ends else context) - 2
        draft = drafter.draft(request, length)[:room] if room > 0 else []
        steps[len(draft) + 1, length // CONTEXT_STEP] += 1
        accepted = 0
        for drafted, token in zip(draft, tokens[length + 1 :], strict=False):
            is_last = answer.is_ended and length + accepted + 1 == end
            if drafted != token or (ends and is_last and accepted + 1 < len(draft)):
                break
            accepted += 1
        if draft:
            drafts.append((len(draft), accepted))
            drafter.accept(accepted)
        length += accepted + 1
    return RequestReplay(drafts, steps, len(answer.tokens) - 1, drafter.has_model)


def replay_speculation(
    speculations: Sequence[Speculation], requests: Iterable[KnownRequest], context: int, *, is_cleared: bool = False
) -> list[RequestReplay]:
    """Replay requests in their order, in one server of one or several types that keeps its state, or with
    ``is_cleared`` in a new server for each. Without types every pass reads one token.
    """
    server = FirstDrafter(speculations)
    return [
        replay_request(FirstDrafter(speculations) if is_cleared else server, request, context) for request in requests
    ]


def total(counts: Iterable[SpeculationCounts]) -> SpeculationCounts:
    rows = [one.model_dump() for one in counts]
    return SpeculationCounts(**{name: sum(row[name] for row in rows) for name in SpeculationCounts.model_fields})
