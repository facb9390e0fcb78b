"""Replay of an engine's speculation over known answers: passes, drafts and what is accepted of them. Loads no torch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.documents.speculation import Speculation
from autotune.engines.ngram_drafters import Drafter, KnownRequest, LookupDrafter, ModDrafter, SimpleDrafter
from autotune.engines.served import Served
from autotune.engines.suffix_drafter import SuffixDrafter
from autotune.workloads.prompt import WorkloadPrompt

CONTEXT_STEP = 32
DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "ngram-simple": SimpleDrafter,
    "ngram-mod": ModDrafter,
    "ngram": LookupDrafter,
    "suffix": SuffixDrafter,
}
KEEPS_STATE = ("ngram-mod", "suffix")
"""Types whose drafts follow from earlier requests too."""


def new_drafter(speculation: Speculation) -> Drafter:
    """The drafter of a new server."""
    return DRAFTERS[speculation.type](*speculation.options.values())


@dataclass(frozen=True)
class EngineRecorded:
    """Plain answers, and those of servers with a draft model."""

    prompts: Sequence[WorkloadPrompt]
    answers: Sequence[Served]
    context: int
    """Most tokens of a request."""
    chains: Mapping[str, Sequence[Served]] = field(default_factory=dict)
    """Answers of a server with each model or head at the greatest depth, by type; to the first prompts, where time was
    short.
    """
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Types of which nothing could be recorded, with the reason."""

    @functools.cached_property
    def known(self) -> list[KnownRequest]:
        """The requests of the plain answers."""
        return [KnownRequest(answer) for answer in self.answers]


@dataclass(frozen=True)
class RequestReplay:
    """Forward passes of one request after its prompt."""

    drafts: list[tuple[int, int]]
    """Draft tokens and accepted ones of each verification."""
    passes: Counter[tuple[int, int]]
    """Number of forward passes by tokens read, and by tokens before them in units of ``CONTEXT_STEP``."""
    num_tokens: int
    """Tokens of the answer after the first, which the prompt gives."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Verifications, draft tokens and accepted ones."""
        drafted, accepted = (sum(row[index] for row in self.drafts) for index in (0, 1))
        return len(self.drafts), drafted, accepted


@dataclass(frozen=True)
class EngineSteps:
    """The passes of a configuration for recorded answers, in their order in one new server."""

    speculation: Speculation | None
    requests: Sequence[RequestReplay]
    """Requests of the plain answers; for a chain, those of its own server's answers, which may be fewer."""
    new_tokens: Sequence[int]
    """Tokens of the plain answers after the first."""

    @property
    def counts(self) -> list[tuple[int, int, int]]:
        return [request.counts for request in self.requests]


def replay_request(drafter: Drafter | None, request: KnownRequest, context: int) -> RequestReplay:
    """Replay one request, and leave the drafter in the state that the server has after it; None reads a token in every
    pass.

    Args:
        context: most tokens of a request, to which a draft is cut.
    """
    answer, tokens = request.answer, request.tokens
    drafts, passes = [], Counter[tuple[int, int]]()
    length, ends = request.prompt_length, drafter is not None and drafter.ends_with_answer
    if drafter is not None:
        drafter.begin(request)
    end = length + len(answer.tokens) - 1
    while length < end:
        room = min(context - length, request.prompt_length + answer.limit - length if ends else context) - 2
        draft = drafter.draft(request, length)[:room] if drafter is not None and room > 0 else []
        passes[len(draft) + 1, length // CONTEXT_STEP] += 1
        accepted = 0
        for drafted, token in zip(draft, tokens[length + 1 :], strict=False):
            is_last = answer.is_ended and length + accepted + 1 == end
            if drafted != token or (ends and is_last and accepted + 1 < len(draft)):
                break
            accepted += 1
        if drafter is not None and draft:
            drafts.append((len(draft), accepted))
            drafter.accept(accepted)
        length += accepted + 1
    return RequestReplay(drafts, passes, len(answer.tokens) - 1)


def replay_speculation(
    speculation: Speculation | None, requests: Iterable[KnownRequest], context: int
) -> list[RequestReplay]:
    """Replay requests in their order in one new server."""
    drafter = None if speculation is None else new_drafter(speculation)
    return [replay_request(drafter, request, context) for request in requests]
