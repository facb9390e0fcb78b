"""Requests at once: throughput and latency of servers. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autotune.documents.deployment import ServedLoad
from autotune.documents.table import Table, times
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


def loads_table(loads: Sequence[ServedLoad]) -> Table:
    """A row for each load; the first one is without speculation."""
    rates = [load.tokens / load.seconds for load in loads]
    rows = [
        [
            load.label,
            f"{load.requests_at_once}",
            f"{rate:.1f}",
            times(rate / rates[0]),
            *("{:.0f}, {:.0f}".format(*ms) for ms in (load.first_token_ms, load.token_ms)),
            f"{load.identical}/{load.requests}",
        ]
        for load, rate in zip(loads, rates, strict=True)
    ]
    title = f"{loads[0].requests} requests, prompts read in their time; median and 95th percentile of requests"
    columns = ["settings", "at once", "tokens/s", "of off", "first token, ms", "output token, ms", "plain's answer"]
    return Table(title, columns, rows)
