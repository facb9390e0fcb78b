"""The self-test of an engine: answers of servers that speculate, beside their replay and a plain server's. Loads no
torch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from autotune.documents.decoded import tokens_per_pass
from autotune.documents.speculation import DEEPEST, Speculation
from autotune.engines.chains import replay_chain
from autotune.engines.engine_server import EngineServer
from autotune.engines.ngram_drafters import KnownRequest
from autotune.engines.prices import TimedRequest
from autotune.engines.replay import EngineRecorded, RequestReplay, replay_speculation
from autotune.engines.served import Served
from autotune.errors import UserError
from autotune.workloads.prompt import WorkloadPrompt

SELF_TEST = 12  # prompts
FEWEST_PROMPTS = 4  # are asked, whatever time that takes
TOLERATED = 0.02  # of tokens per pass: the difference of a chain's server from the replay


def answers_in_turn(
    servers: Sequence[EngineServer], recorded: EngineRecorded, until: float, *, pause_s: float = 0.0, seed: int = 0
) -> list[list[Served]]:
    """Answers of each server to the first prompts of more than one token. All are asked a prompt within seconds.

    Args:
        until: time of ``time.monotonic()`` after which no prompt begins, apart from the first ones.
        pause_s: time after an answer for which a server keeps a core busy.
    """
    answers, order = {server: list[Served]() for server in servers}, random.Random(seed)
    answered = zip(recorded.prompts, recorded.answers, strict=True)
    prompts = [prompt for prompt, answer in answered if len(answer.tokens) > 1]
    for number, prompt in enumerate(prompts[:SELF_TEST]):
        if number >= FEWEST_PROMPTS and time.monotonic() > until:
            break
        for server in order.sample(servers, len(servers)):
            answers[server].append(server.ask(prompt))
            time.sleep(pause_s)
    return list(answers.values())


def replayed_answers(
    tested: Speculation, answers: Sequence[Served], server: EngineServer, prompts: Sequence[WorkloadPrompt]
) -> tuple[list[Served], list[RequestReplay]]:
    """Answers of a new server, with their continuations, and their replay.

    Args:
        server: another one, which continues the answers.
        prompts: of the answers, in any order.
    """
    asked = {prompt.sha256: prompt for prompt in prompts}
    answers = [
        answer.model_copy(update={"beyond": server.continuation(answer, asked[answer.prompt_sha256])})
        for answer in answers
    ]
    return answers, replay_speculation(tested, map(KnownRequest, answers), server.context)


def exact_requests(requests: Sequence[TimedRequest], tolerated: float) -> tuple[list[TimedRequest], str]:
    """The requests whose counts are those of the replay, and the counts of all in words.

    Args:
        tolerated: share of the requests whose counts may differ.

    Raises:
        UserError: more of them differ.
    """
    exact = [request for request in requests if request.answer.draft_counts == request.replayed.counts]
    counted, predicted = (
        "{} verifications, {} drafted, {} accepted".format(*map(sum, zip(*rows, strict=True)))
        for rows in zip(*((answer.draft_counts, replayed.counts) for answer, _, replayed in requests), strict=True)
    )
    if len(exact) < (1 - tolerated) * len(requests):
        raise UserError(f"the build has another rule: {counted}; predicted are {predicted}")
    return exact, f"counts are the predicted in {len(exact)} of {len(requests)} requests; {counted}"


def differing_answers(plain: Sequence[Served], recorded: EngineRecorded) -> str:
    """The number of plain answers that are others than the recorded ones to the same prompts, in words."""
    known = {answer.prompt_sha256: answer.tokens for answer in recorded.answers}
    differing = sum(answer.tokens != known[answer.prompt_sha256] for answer in plain)
    return f"{differing} of {len(plain)} plain answers differ from the recorded"


def chain_requests(
    chain: Speculation, answers: Sequence[Served], plain: Sequence[Served], recorded: EngineRecorded
) -> list[TimedRequest]:
    """Answers of a server of a chain beside the replay of the recorded ones to the same prompts."""
    replayed = {
        answer.prompt_sha256: replay_chain(chain, answer, recorded.context)[0] for answer in recorded.chains[chain.type]
    }
    return [
        TimedRequest(answer, beside, replayed[answer.prompt_sha256])
        for answer, beside in zip(answers, plain, strict=True)
        if answer.prompt_sha256 in replayed
    ]


def require_replayed(requests: Sequence[TimedRequest]) -> str:
    """The counts of a server of a chain beside those of the replay, in words.

    Raises:
        UserError: the tokens per pass differ.
    """
    counted = tokens_per_pass(
        (len(answer.tokens) - 1, answer.rounds, answer.accepted_tokens) for answer, *_ in requests
    )
    predicted = tokens_per_pass((replayed.num_tokens, *replayed.counts[::2]) for *_, replayed in requests)
    exact = sum(answer.draft_counts == replayed.counts for answer, _, replayed in requests)
    text = f"{counted:.3f} tokens per pass, predicted {predicted:.3f}"
    if abs(counted / predicted - 1) > TOLERATED:
        raise UserError(f"the build drafts otherwise than at depth {DEEPEST}: {text}")
    return f"counts are the predicted in {exact} of {len(requests)} requests; {text}"
