"""Chains: the drafts of a model or head, recorded at the greatest depth, replayed at every depth. Loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autotune.documents.speculation import DEEPEST, Speculation
from autotune.engines.engine_server import EngineServer
from autotune.engines.prices import Pairs
from autotune.engines.replay import CONTEXT_STEP, EngineRecorded, RequestReplay
from autotune.engines.served import Served
from autotune.errors import UserError

CUT_AT_LIMIT = "draft-"  # begin of llama.cpp's types, whose drafts end with what a request may still generate
TOLERATED = 0.02  # of tokens per pass: the difference of a chain's server from the replay


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


def pairs_of(chain: Speculation, answers: Sequence[Served], recorded: EngineRecorded) -> Pairs:
    """Answers of a server of a chain, beside the replay of the recorded ones to the same prompts."""
    replayed = {
        answer.prompt_sha256: replay_chain(chain, answer, recorded.context)[0] for answer in recorded.chains[chain.type]
    }
    known = [answer for answer in answers if answer.prompt_sha256 in replayed]
    return [(answer, replayed[answer.prompt_sha256]) for answer in known]


def require_replayed(pairs: Pairs) -> str:
    """The counts of a server beside those of the replay, in words.

    Raises:
        UserError: the tokens per pass differ.
    """
    counted = tokens_per_pass([(len(answer.tokens) - 1, answer.accepted_tokens) for answer, _ in pairs])
    predicted = tokens_per_pass([(replayed.num_tokens, replayed.counts[-1]) for _, replayed in pairs])
    exact = sum(answer.draft_counts == replayed.counts for answer, replayed in pairs)
    text = f"{counted:.3f} tokens per pass, predicted {predicted:.3f}"
    if abs(counted / predicted - 1) > TOLERATED:
        raise UserError(f"the build drafts otherwise than at depth {DEEPEST}: {text}")
    return f"counts are the predicted in {exact} of {len(pairs)} requests; {text}"


def tokens_per_pass(requests: Sequence[tuple[int, int]]) -> float:
    """Tokens that a pass gives in the mean, of requests with their tokens and accepted draft tokens."""
    tokens, accepted = map(sum, zip(*requests, strict=True))
    return tokens / (tokens - accepted)
