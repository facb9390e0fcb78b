"""Chains: the drafts of a model or head, recorded at the greatest depth, replayed at every depth. Loads no torch."""

from __future__ import annotations

from collections import Counter

from autotune.documents.speculation import DEEPEST, Speculation
from autotune.engines.engine_server import EngineServer
from autotune.engines.replay import CONTEXT_STEP, RequestReplay
from autotune.engines.served import Served

CUT_AT_LIMIT = "draft-"  # begin of llama.cpp's types, whose drafts end with what a request may still generate


def known_drafts(answer: Served) -> dict[int, tuple[int, bool]]:
    """Draft tokens of a chain that are the answer's, by the number of the answer's tokens before them, and whether the
    next one is known to differ. What a chain drafts after a few of its tokens is the rest of it: exactly so for a draft
    model, which reads the text alone.
    """
    known = dict[int, tuple[int, bool]]()
    for place, drafted, accepted in sorted(answer.verifications, reverse=True):
        more, is_known = known.get(place + drafted, (0, False)) if accepted == drafted else (0, True)
        for inside in range(accepted + 1):
            known.setdefault(place + inside, (accepted - inside + more, is_known))
    return known


def replay_chain(chain: Speculation, answer: Served, context: int) -> tuple[RequestReplay, set[int]]:
    """The request of a server that drafts chains, from what is known of longer ones, and the places behind which that
    is not enough; the draft counts as wrong there.

    Args:
        context: most tokens of a request, to which a draft is cut.
    """
    known, deepest = known_drafts(answer), max((drafted for _, drafted, _ in answer.verifications), default=DEEPEST)
    drafts, passes, unknown = [], Counter[tuple[int, int]](), set[int]()
    before, place = len(answer.prompt_tokens) - 1, 1
    while place < len(answer.tokens):
        room = context - before - place
        if ends := chain.type.startswith(CUT_AT_LIMIT):
            room = min(room, answer.limit - place + 1)
        drafted = max(0, min(chain.depth or 0, deepest, room - 2))
        right, is_known = known.get(place, (0, False))
        if right < drafted and not is_known:
            unknown.add(place + right)
        accepted = min(right, drafted)
        if ends and answer.is_ended and drafted == right + 1 == len(answer.tokens) - place:
            accepted = drafted  # the end is an accepted token where it ends the draft, too, and else not counted
        passes[drafted + 1, (before + place) // CONTEXT_STEP] += 1
        if drafted:
            drafts.append((drafted, accepted))
        place += accepted + 1
    return RequestReplay(drafts, passes, len(answer.tokens) - 1), unknown


def with_all_depths(answer: Served, head: Speculation, server: EngineServer) -> Served:
    """An answer of a server at the greatest depth with what the replay of other depths needs beside it: the server is
    asked for a verification behind drafts that were accepted whole, and where its reply did not tell them.
    """
    chains = [head.at_depth(k) or head for k in range(1, (head.depth or 0) + 1)]
    while unknown := set().union(*(replay_chain(chain, answer, server.context)[1] for chain in chains)):
        verifications = list(answer.verifications)
        for place in sorted(unknown):
            asked = server.verified([*answer.prompt_tokens, *answer.tokens[: place - 1]]).verifications
            _, *counts = next((row for row in asked if row[0] == 1), [1, 1, 0])  # not told: the draft is wrong
            verifications.append([place, *counts])
        answer = answer.model_copy(update={"verifications": verifications})
    return answer
