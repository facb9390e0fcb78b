"""Prices of forward passes in llama-server by the number of tokens verified, from one server. Loads no torch.

One request is exactly one verification of n tokens: its prompt ends in a run of one token, the same token is forced at every position,
so that the n-gram draft repeats it, and the server cuts the draft to what is left of ``n_predict`` = n + 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autotune.console import Update
from autotune.documents.engine_profile import PricedStep, Speculation
from autotune.errors import UserError
from autotune.serving.llama_server import LlamaServer, TimedAnswer
from autotune.serving.ngram_replay import CONTEXT_STEP, RequestReplay

Clock = Literal["wall", "cpu"]
PRICED_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
REPEATS = 3
RUN = 8  # tokens of the run at the end of a prompt: more than the pool's n-gram has
PRICING = [
    Speculation(type="ngram-simple", options={"size-n": 12, "size-m": 16}),
    Speculation(type="ngram-map-k", options={"size-n": 9, "size-m": 12}),
    Speculation(type="ngram-map-k4v", options={"size-n": 6, "size-m": 10, "min-hits": 1}),
    Speculation(type="ngram-mod", options={"n-match": 4, "n-min": 0, "n-max": 64}),
    Speculation(type="ngram-cache"),
]
"""One server of all types, whose drafts the self-test checks and with which steps are priced: in a short run only the pool drafts."""
PRICING_COMMAND = "--spec-type ngram-mod --spec-ngram-mod-n-match 4 --spec-ngram-mod-n-min 0 --spec-ngram-mod-n-max 64"
DISAGREEMENT = 0.05  # between ratios of wall and of CPU times, above which other processes used the machine
REFITTED = 3  # fewest verifications of a request that refits prices


def measure_verifications(
    server: LlamaServer, prompts: Sequence[list[int]], token: int, update: Update, *, seed: int
) -> list[PricedStep]:
    """Time one verification of each length after each prompt, in random order.

    Raises:
        UserError: the server drafts other numbers of tokens.
    """
    steps = {(n, at): ([], []) for n in PRICED_TOKENS for at in range(len(prompts))}  # type: dict[tuple[int, int], tuple[list[float], list[float]]]
    order, done = random.Random(seed), 0
    for at, prompt in enumerate(prompts):
        tokens = [*prompt, *[token] * RUN]
        server.answer(tokens, 1)  # the prompt's KV cache, which the requests below share
        for repeat in range(REPEATS + 1):
            for n in order.sample(PRICED_TOKENS, len(PRICED_TOKENS)):
                timed = server.answer(tokens, n + 1, forced=token)
                if timed.drafted != n - 1 or len(timed.answer.tokens) != n + 1:
                    raise UserError(
                        f"{server.url}: a request for one verification of {n} tokens drafted {timed.drafted}; start the server with "
                        f"{PRICING_COMMAND}, or let autotune start it"
                    )
                if repeat:  # the first pass builds the server's graphs
                    steps[n, at][0].append(timed.wall_ms)
                    steps[n, at][1].append(timed.cpu_ms)
            done += 1
            update(done, len(prompts) * (REPEATS + 1), "")
    return [
        PricedStep(
            tokens=n, context=len(prompts[at]) + RUN, wall_ms=wall, cpu_ms=[0.0 if ms != ms else ms for ms in cpu]
        )
        for (n, at), (wall, cpu) in steps.items()
    ]


@dataclass(frozen=True)
class VerificationPrices:
    """Milliseconds of a forward pass by tokens read and tokens before them, interpolated between medians."""

    steps: Sequence[PricedStep]
    clock: Clock
    factor: float = 1.0
    """Of passes that verify a draft, over the prices' own (``refitted``)."""

    def ms(self, tokens: int, context: int) -> float:
        contexts = sorted({step.context for step in self.steps})
        by_context = []
        for one in contexts:
            rows = sorted((s.tokens, self._median(s)) for s in self.steps if s.context == one)
            by_context.append(float(np.interp(tokens, [row[0] for row in rows], [row[1] for row in rows])))
        return float(np.interp(context, contexts, by_context)) * (self.factor if tokens > 1 else 1.0)

    def _median(self, step: PricedStep) -> float:
        return float(np.median(step.wall_ms if self.clock == "wall" else step.cpu_ms))

    def pricer(self, most: int, longest: int) -> Callable[[RequestReplay], tuple[float, float]]:
        """A function that prices plain steps and verifications of a replay, in ms, from a table of all sizes."""
        table = [
            [self.ms(tokens, (unit + 0.5) * CONTEXT_STEP) for unit in range(longest // CONTEXT_STEP + 1)]  # type: ignore[arg-type]
            for tokens in range(1, most + 1)
        ]

        def price(replayed: RequestReplay) -> tuple[float, float]:
            plain = verified = 0.0
            for (tokens, unit), number in replayed.steps.items():
                ms = table[tokens - 1][unit] * number
                plain, verified = (plain + ms, verified) if tokens == 1 else (plain, verified + ms)
            return plain, verified

        return price


def refitted(
    prices: VerificationPrices,
    plain: Sequence[tuple[TimedAnswer, RequestReplay]],
    served: Sequence[tuple[TimedAnswer, RequestReplay]],
    longest: int,
) -> float:
    """Time of verifications in served requests over their prices, in units of the same ratio of plain steps; the median over
    requests, 1 where too few verify drafts.
    """
    price = prices.pricer(PRICED_TOKENS[-1] + 1, longest)
    time = time_of(prices.clock)
    ratios = [time(timed) / sum(price(replayed)) for timed, replayed in plain if replayed.num_tokens]
    step = float(np.median(ratios))
    found = []
    for timed, replayed in served:
        steps_ms, verified_ms = price(replayed)
        if len(replayed.drafts) >= REFITTED:
            found.append((time(timed) / step - steps_ms) / verified_ms)
    return float(np.clip(np.median(found), 0.5, 3.0)) if len(found) >= REFITTED else 1.0


def time_of(clock: Clock) -> Callable[[TimedAnswer], float]:
    return (lambda timed: timed.wall_ms) if clock == "wall" else (lambda timed: timed.cpu_ms)


def choose_clock(ratios: NDArray[np.float64]) -> Clock:
    """The clock of ratios of [wall, CPU]: wall, unless one of them disagrees by more than ``DISAGREEMENT``."""
    wall, cpu = ratios
    if not np.isfinite(cpu).all() or (cpu <= 0).any():
        return "wall"
    return "wall" if (np.abs(wall / cpu - 1) <= DISAGREEMENT).all() else "cpu"
