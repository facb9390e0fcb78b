"""Several requests at a time in llama-server: tokens per second, time to the first token and per output token. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autotune.console import Console
from autotune.documents.engine_profile import ServedAnswer, ServedLoad
from autotune.serving.engine_runs import Arms
from autotune.serving.llama_server import EngineCommand, started_llama
from autotune.serving.verification_prices import PRICED_TOKENS

WARM_UP = 2  # tokens of a request that builds the server's graphs


def measure_loads(
    command: EngineCommand, arms: Arms, answers: Sequence[ServedAnswer], sizes: Sequence[int], console: Console
) -> list[ServedLoad]:
    """Serve the prompts of plain answers with each number of requests at a time, each time in a new server for every arm, one
    server after the other; prints a table.
    """
    # A slot holds the longest request with a draft.
    slot = max(len(one.prompt_tokens) + one.limit for one in answers) + PRICED_TOKENS[-1]
    loads, starts = list[ServedLoad](), [(size, name) for size in sizes for name in arms]
    with console.stage("requests at once") as update:
        for number, (size, name) in enumerate(starts, start=1):
            with started_llama(
                command, arms[name], ("--parallel", f"{size}", "--ctx-size", f"{size * slot}")
            ) as server:
                server.stream(answers[0].model_copy(update={"limit": WARM_UP}))
                started = time.perf_counter()
                with ThreadPoolExecutor(size) as pool:
                    found = list(pool.map(server.stream, answers))
                spent = time.perf_counter() - started
            firsts = [1e3 * seconds[0] for _, seconds in found]
            rest = [1e3 * (seconds[-1] - seconds[0]) / (len(seconds) - 1) for _, seconds in found if len(seconds) > 1]
            load = ServedLoad(
                label=name,
                requests_at_once=size,
                requests=len(found),
                tokens=sum(len(tokens) for tokens, _ in found),
                seconds=spent,
                first_token_ms=_middle_and_high(firsts),
                token_ms=_middle_and_high(rest or [0.0]),
                identical=sum(tokens == one.tokens for (tokens, _), one in zip(found, answers, strict=True)),
            )
            loads.append(load)
            update(number, len(starts), "")
    console.table(
        f"{len(answers)} requests, prompts read in their time; median and 95th percentile of requests",
        ["settings", "at once", "tokens/s", "first token, ms", "output token, ms", "plain's answer"],
        [
            [
                load.label,
                f"{load.requests_at_once}",
                f"{load.tokens / load.seconds:.1f}",
                *("{:.0f}, {:.0f}".format(*ms) for ms in (load.first_token_ms, load.token_ms)),
                f"{load.identical}/{load.requests}",
            ]
            for load in loads
        ],
    )
    return loads


def _middle_and_high(values: Sequence[float]) -> tuple[float, float]:
    middle, high = np.percentile(values, [50, 95])
    return float(middle), float(high)
