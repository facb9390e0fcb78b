"""A closed loop of clients over recorded prompts: several requests at once. Loads no torch."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autotune.documents.loads import LoadRun
from autotune.engines.engine_server import EngineServer
from autotune.engines.replay import EngineRecorded
from autotune.errors import UserError

REQUESTS_PER_CLIENT = 4  # at least, where prompts may be repeated; 2 where not
LoadedRequest = tuple[float, float, float, int, bool]
"""Seconds from the first request of all to a request, its first and its last token; its number of tokens; and whether
the answer is plain decoding's.
"""


def serve_load(
    server: EngineServer, recorded: EngineRecorded, at_once: int, label: str, *, repeats: bool = True, seed: int = 0
) -> LoadRun:
    """Serve the recorded prompts with ``at_once`` clients.

    Args:
        repeats: send the prompts again, in another order, until every client has had ``REQUESTS_PER_CLIENT``; not to a
            server that drafts from its earlier answers.

    Raises:
        UserError: a request fails, requests wait for others to end, or the prompts are too few.
    """
    answers, shuffled = recorded.answers, random.Random(seed)
    number = len(answers)
    if not repeats and number < 2 * at_once:
        raise UserError(f"it drafts from earlier answers, and needs {2 * at_once} prompts; there are {number}")
    passes = -(-REQUESTS_PER_CLIENT * at_once // number) if repeats else 1
    order = [(place, again) for again in range(passes) for place in shuffled.sample(range(number), number)]
    states, started = [server.under_load()], time.perf_counter()

    def send(sent: tuple[int, int]) -> LoadedRequest:
        place, again = sent
        begun = time.perf_counter() - started
        tokens, seconds = server.stream(answers[place], recorded.prompts[place], cache=f"{at_once}.{again}")
        states.append(server.under_load())
        with server.reply_of(""):
            return begun, begun + seconds[0], begun + seconds[-1], len(tokens), tokens == answers[place].tokens

    with ThreadPoolExecutor(at_once) as pool:
        requests = list(pool.map(send, order))
    waiting, cached, read = np.array(states).T
    if np.median(waiting) > 0:  # when a request ends, so that a place for another one is free
        raise UserError(f"the server lets up to {waiting.max()} of them wait")
    cached, read = np.ptp(cached), np.ptp(read)
    return busy_run(requests, at_once, label, float(cached / read) if read else None)


def busy_run(requests: Sequence[LoadedRequest], at_once: int, label: str, hit_rate: float | None = None) -> LoadRun:
    """The run of requests, from when every client has had a token to the first end after which a client had nothing to
    send. The tokens of a request come at even distances.

    Raises:
        UserError: the clients were never all busy.
    """
    begun, first, last, tokens, identical = np.array(requests, np.float64).T
    begin, end = first[:at_once].max(), last[last > begun.max()].min(initial=last.max())
    is_busy, following = begun >= begin, tokens - 1
    if end <= begin or not is_busy.any():
        raise UserError("requests ended before all clients were busy; give more prompts or longer answers")
    until_begin, until_end = (
        (at >= first) * (1 + following * np.clip((at - first) / np.maximum(last - first, 1e-9), 0, 1))
        for at in (begin, end)
    )
    latencies = np.array([1e3 * (first - begun), 1e3 * (last - first), following]).T[is_busy]
    return LoadRun(
        label=label,
        at_once=at_once,
        tokens=(until_end - until_begin).tolist(),
        seconds=np.maximum(np.minimum(last, end) - np.maximum(begun, begin), 0).tolist(),
        latencies=latencies.tolist(),
        identical=int(identical.sum()),
        hit_rate=hit_rate,
    )
