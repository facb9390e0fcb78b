"""Requests at once: throughput and latency of servers. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autotune.documents.deployment import ServedLoad
from autotune.engines.engine_server import EngineServer
from autotune.engines.served import Served
from autotune.workloads.prompt import WorkloadPrompt


def measure_load(
    server: EngineServer,
    answers: Sequence[Served],
    prompts: Sequence[WorkloadPrompt],
    requests_at_once: int,
    label: str,
) -> ServedLoad:
    """Serve the prompts of plain answers, several at a time, in a new server."""
    server.stream(answers[0].model_copy(update={"limit": 2}), prompts[0])
    started = time.perf_counter()
    with ThreadPoolExecutor(requests_at_once) as pool:
        replies = list(pool.map(server.stream, answers, prompts))
    spent = time.perf_counter() - started
    first_ms = [1e3 * seconds[0] for _, seconds in replies]
    token_ms = [1e3 * (seconds[-1] - seconds[0]) / max(1, len(tokens) - 1) for tokens, seconds in replies]
    return ServedLoad(
        label=label,
        requests_at_once=requests_at_once,
        requests=len(replies),
        tokens=sum(len(tokens) for tokens, _ in replies),
        seconds=spent,
        first_token_ms=tuple(np.percentile(first_ms, [50, 95]).tolist()),
        token_ms=tuple(np.percentile(token_ms, [50, 95]).tolist()),
        identical=sum(tokens == answer.tokens for (tokens, _), answer in zip(replies, answers, strict=True)),
    )
