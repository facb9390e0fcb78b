"""Prices of an engine's forward passes by the number of tokens verified, from one server. Loads no torch."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.console import Update
from autotune.documents.engine_profile import Clock, EngineProfile, PricedStep, ServedAnswer
from autotune.engines.engine import EngineServer
from autotune.engines.ngram_replay import CONTEXT_STEP, Replayed, RequestReplay
from autotune.errors import UserError

PRICED_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
REPEATS = 3
CPU_RATIO = 4  # of CPU times of the longest verification and of a plain pass, above which the CPU computes them
MISFIT = 0.05  # of a request's time to its price, beyond which it counts less
FEWEST = 3  # verifications of a request, and such requests, that refit prices


def measure_verifications(
    server: EngineServer, prompts: Sequence[list[int]], update: Update, *, seed: int
) -> list[PricedStep]:
    """Time one verification of each length after each prompt, in random order.

    Raises:
        UserError: the server drafts other numbers of tokens.
    """
    wall, cpu = defaultdict[tuple[int, int], list[float]](list), defaultdict[tuple[int, int], list[float]](list)
    order, passes = random.Random(seed), [prompt for prompt in prompts for _ in range(REPEATS + 1)]
    priced = [n for n in PRICED_TOKENS if n <= server.longest]
    for done, prompt in enumerate(passes, start=1):
        # After the first, the prompt is in the KV cache.
        for n in (1, *order.sample(priced, len(priced))):
            answer = server.verify(prompt, n)
            if (answer.drafted, len(answer.tokens)) != (n - 1, n + 1):
                raise UserError(
                    f"{server.url}: a request for one verification of {n} tokens drafted {answer.drafted}; start the server with "
                    f"{server.priced_by}"
                )
            wall[n, len(prompt)].append(answer.wall_ms)
            cpu[n, len(prompt)].append(answer.cpu_ms)
        update(done, len(passes), "")
    # The first pass builds the server's graphs.
    return [
        PricedStep(tokens=n, context=context, wall_ms=wall[n, context][-REPEATS:], cpu_ms=cpu[n, context][-REPEATS:])
        for n, context in wall
    ]


@dataclass(frozen=True)
class VerificationPrices:
    """Milliseconds of a forward pass by tokens read and tokens before them, interpolated between medians."""

    steps: Sequence[PricedStep]
    clock: Clock
    factor: float = 1.0
    """Multiplies the prices of passes that verify a draft (``served_prices``)."""
    step_factor: float = 1.0
    """Multiplies the prices of passes over one token."""
    plain_factor: float = 1.0
    """Multiplies those too without speculation, where the engine runs another loop then."""
    draft_ms: tuple[float, float] = (0.0, 0.0)
    """Added by a draft model to a verification, and for each draft token."""
    at_once: int = 1
    """Requests that share a pass in equal parts; each pays its part."""

    def ms(self, tokens: int, context: float) -> float:
        """Beyond the longest verification that was priced, on the line through it and the last but two."""
        contexts, at_contexts = sorted({step.context for step in self.steps}), list[float]()
        read = tokens * self.at_once
        for one in contexts:
            row = sorted((step.tokens, self._median(step)) for step in self.steps if step.context == one)
            numbers, times = np.array(row).T
            slope = (times[-1] - times[-3:][0]) / max(1, numbers[-1] - numbers[-3:][0])
            at_contexts.append(np.interp(read, numbers, times) + slope * max(0, read - numbers[-1]))
        ms = float(np.interp(context, contexts, at_contexts)) / self.at_once
        return ms * (self.factor if tokens > 1 else self.step_factor)

    def _median(self, step: PricedStep) -> float:
        return float(np.median(step.wall_ms if self.clock == "wall" else step.cpu_ms))

    def pricer(self, longest: int) -> Callable[[RequestReplay], tuple[float, float]]:
        """A function that prices the plain passes and the verifications of a replay, for requests of at most
        ``longest`` tokens.
        """
        units = range(longest // CONTEXT_STEP + 1)
        table = [[self.ms(n, (unit + 0.5) * CONTEXT_STEP) for unit in units] for n in range(PRICED_TOKENS[-1] + 2)]
        # The passes of a draft model are shared as plain ones are.
        part = table[1][0] / replace(self, at_once=1).ms(1, CONTEXT_STEP / 2)

        def price(replayed: RequestReplay) -> tuple[float, float]:
            ms = {key: table[key[0]][key[1]] * number for key, number in replayed.steps.items()}
            plain = sum(value for (tokens, _), value in ms.items() if tokens == 1)
            counts, (round_ms, token_ms) = replayed.counts, self.draft_ms if replayed.has_model else (0.0, 0.0)
            draft_ms = part * (round_ms * counts.verifications + token_ms * counts.drafted)
            return plain, sum(ms.values()) - plain + draft_ms

        return price


def prices_of(profile: EngineProfile) -> VerificationPrices:
    """The prices that a profile holds."""
    factors = profile.price_factor, profile.step_factor, profile.plain_factor
    return VerificationPrices(profile.prices, clock_of(profile.prices), *factors, profile.draft_ms)


def clock_of(steps: Sequence[PricedStep]) -> Clock:
    """The CPU's where the engine computes on it, so that long verifications take its time; else the wall's."""
    least, most = (
        np.median([ms for step in steps if step.tokens == n for ms in step.cpu_ms])
        for n in (1, max(step.tokens for step in steps))
    )
    return "cpu" if most > CPU_RATIO * least > 0 else "wall"


def time_of(clock: Clock) -> Callable[[ServedAnswer], float]:
    return lambda answer: answer.wall_ms if clock == "wall" else answer.cpu_ms


def served_prices(
    prices: VerificationPrices, plain: Sequence[Replayed], served: Sequence[Replayed], *, has_one_loop: bool
) -> VerificationPrices:
    """The prices with the factors of served requests: a robust fit to the times of those that verify drafts, and of
    those without speculation too in an engine that ``has_one_loop``. Where too few verify drafts, both kinds of passes
    have one factor.
    """
    from scipy.optimize import least_squares  # takes a second to import

    time = time_of(prices.clock)
    price = prices.pricer(max(len(one.prompt_tokens) + len(one.tokens) for one, _ in (*plain, *served)))
    off, drafting = (
        [(*price(replayed), time(answer)) for answer, replayed in rows if replayed.num_tokens]
        for rows in (plain, served)
    )
    alone = float(np.median([ms / priced for priced, _, ms in off]))
    step = factor = alone if has_one_loop else 1.0
    if sum(len(replayed.drafts) >= FEWEST for _, replayed in served) >= FEWEST:
        rows = np.array([*drafting, *(off if has_one_loop else ())])
        misfit = lambda factors: rows[:, :2] @ factors / rows[:, 2] - 1  # noqa: E731
        step, factor = least_squares(misfit, [1.0, 1.0], bounds=(0.5, 3.0), loss="soft_l1", f_scale=MISFIT).x.tolist()
    return replace(prices, factor=factor, step_factor=step, plain_factor=1.0 if has_one_loop else alone / step)


def with_draft(prices: VerificationPrices, served: Sequence[Sequence[Replayed]]) -> VerificationPrices:
    """The prices with the time of a draft model, by requests of two servers that drafted other numbers of tokens: what
    a round takes beside its verification (medians over requests) is linear in the draft tokens.
    """
    longest = max(len(one.prompt_tokens) + len(one.tokens) for rows in served for one, _ in rows)
    time, price, points = time_of(prices.clock), prices.pricer(longest), []
    for rows in served:
        drafting = [(time(one) - sum(price(found)), found.counts) for one, found in rows if found.drafts]
        rounds = np.median([ms / counts.verifications for ms, counts in drafting])
        points.append((drafting[0][1].drafted / drafting[0][1].verifications, float(rounds)))
    (short, short_ms), (long, long_ms) = sorted(points)
    token_ms = max(0.0, (long_ms - short_ms) / (long - short))
    return replace(prices, draft_ms=(max(0.0, short_ms - short * token_ms), token_ms))
