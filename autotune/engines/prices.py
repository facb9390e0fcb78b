"""Prices of an engine's forward passes by the number of tokens verified, from one server. Loads no torch."""

from __future__ import annotations

import functools
import math
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from autotune.console import Update
from autotune.documents.deployment import PricedStep
from autotune.documents.speculation import DEEPEST, Speculation
from autotune.engines.backend import Prices
from autotune.engines.engine_server import EngineServer
from autotune.engines.replay import CONTEXT_STEP, EngineSteps, RequestReplay
from autotune.engines.served import Served
from autotune.errors import UserError
from autotune.trees.limits import Floats

PRICED_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
REPEATS = 3
SHORT = DEEPEST + 1  # tokens of the longest verification of a chain
SHORT_REPEATS = 3  # of one up to that length in each repetition, because a single one varies by a fifth
CPU_RATIO = 4  # of CPU times of the longest verification and of a plain pass, above which the CPU computes them
MISFIT = 0.1  # of a request's time to its price, beyond which it counts less
FEWEST = 3  # verifications of a request, and such requests, that refit prices
ALONE = {"step": 1.0, "verification": 1.0}
"""Times in a server that speculates over those in a plain one, of passes over one token and of verifications."""


class TimedRequest(NamedTuple):
    """A request of a server that speculates, beside its replay."""

    answer: Served
    plain: Served
    """The answer of a plain server, which was asked within seconds."""
    replayed: RequestReplay


def measure_verifications(
    server: EngineServer, prompts: Sequence[list[int]], update: Update, *, seed: int, until: float = math.inf
) -> list[PricedStep]:
    """Time verifications of each length after each prompt, in random order.

    Args:
        until: time of ``time.monotonic()`` after which no repetition begins, apart from the first that counts.

    Raises:
        UserError: the server drafts other numbers of tokens.
    """
    samples = defaultdict[tuple[int, int], list[Served]](list)
    order, lengths = random.Random(seed), [n for n in PRICED_TOKENS if n <= server.longest]
    again = [n for n in lengths if n <= SHORT] * (SHORT_REPEATS - 1)
    passes = [(prompt, number) for prompt in prompts for number in range(REPEATS + 1)]
    for done, (prompt, number) in enumerate(passes, start=1):
        if number > 1 and time.monotonic() > until:
            continue
        # The first repetition, which does not count, reads the prompt and builds the server's graphs.
        asked = [*lengths, *again] if number > 0 else lengths
        for n in order.sample(asked, len(asked)):
            answer = server.verify(prompt, n)
            if (answer.verified_nodes, len(answer.tokens)) != (n - 1, n + 1):
                raise UserError(
                    f"{server.url}: a request for one verification of {n} tokens drafted {answer.verified_nodes}; start the server with "
                    f"{server.priced_by}"
                )
            if number > 0:
                samples[n, len(prompt)].append(answer)
        update(done, len(passes))
    return [
        PricedStep(
            tokens=n,
            context=context,
            wall_ms=[answer.decode_ms for answer in answers],
            cpu_ms=[answer.cpu_ms for answer in answers],
        )
        for (n, context), answers in samples.items()
    ]


@dataclass
class EnginePrices(Prices):
    """Milliseconds of a forward pass by tokens read and tokens before them, interpolated between medians."""

    factors: Mapping[str, float] = field(default_factory=lambda: dict(ALONE))
    """See ``ALONE``."""
    drafts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Milliseconds of a draft, and of each of its tokens, by type."""

    @functools.cached_property
    def clock(self) -> Literal["wall", "cpu"]:
        """The CPU's where the engine computes on it, so that long verifications take its time; else the wall's."""
        least, most = (
            np.median([ms for step in self.priced if step.tokens == n for ms in step.cpu_ms])
            for n in (1, max(step.tokens for step in self.priced))
        )
        return "cpu" if most > CPU_RATIO * least > 0 else "wall"

    @functools.cached_property
    def _measured(self) -> dict[int, Floats]:
        """Numbers of tokens, in their order, and median times, by context. Of medians that fall with the number of
        tokens, which no pass does, the mean counts.
        """
        from scipy.optimize import isotonic_regression  # takes a second to import

        rows = defaultdict[int, list[tuple[int, float]]](list)
        for step in sorted(self.priced, key=lambda step: (step.context, step.tokens)):
            ms = step.wall_ms if self.clock == "wall" else step.cpu_ms
            rows[step.context].append((step.tokens, float(np.median(ms))))
        measured = {context: np.array(row).T for context, row in rows.items()}
        return {context: np.array([tokens, isotonic_regression(ms).x]) for context, (tokens, ms) in measured.items()}

    def pass_ms(self, tokens: int, context: float) -> float:
        """The time of a pass alone; of the longest one that was priced for more tokens."""
        at_contexts = [np.interp(tokens, numbers, times) for numbers, times in self._measured.values()]
        return float(np.interp(context, list(self._measured), at_contexts))

    def parts_ms(self, request: RequestReplay) -> tuple[float, float]:
        """The times of a request's passes over one token, and of its verifications, as they take alone."""
        ms = defaultdict[bool, float](float)
        for (tokens, unit), number in request.passes.items():
            ms[tokens > 1] += number * self.pass_ms(tokens, (unit + 0.5) * CONTEXT_STEP)
        return ms[False], ms[True]

    def request_ms(self, request: RequestReplay, speculation: Speculation | None) -> float:
        """The time of a request's passes and drafts in a server."""
        plain, verifying = self.parts_ms(request)
        if speculation is None:
            return plain
        ms = self.factors["step"] * plain + self.factors["verification"] * verifying
        draft_ms, token_ms = self.drafts.get(speculation.type, (0.0, 0.0))
        verifications, drafted, _ = request.counts
        return ms + verifications * draft_ms + drafted * token_ms

    def ms(self, steps: EngineSteps) -> Floats:
        """See ``Prices.ms``. A chain's answer may have another length than the plain one; a token of a prompt that its
        server did not decode takes the mean time of the others'.
        """
        ms = np.array([self.request_ms(request, steps.speculation) for request in steps.requests])
        rates = ms / np.array([max(1, request.num_tokens) for request in steps.requests])
        missing = len(steps.new_tokens) - len(rates)
        return np.array([*rates, *[rates.mean()] * missing]) * steps.new_tokens

    def clock_ms(self, answer: Served) -> float:
        """The time of an answer by the clock of the prices."""
        return answer.decode_ms if self.clock == "wall" else answer.cpu_ms

    def scale(self, plain: Served) -> float:
        """The time of a plain answer by its priced passes, over what it took: a machine's speed changes from minute to
        minute.
        """
        passes = len(plain.tokens) - 1
        return passes * self.pass_ms(1, len(plain.prompt_tokens) + passes / 2) / self.clock_ms(plain)

    def text(self) -> str:
        """The prices in one line, in plain steps."""
        context = float(np.median([step.context for step in self.priced]))
        shown = [f"{n}: {self.pass_ms(n, context) / self.pass_ms(1, context):.1f}" for n in (2, 4, 8, 16)]
        factors = ", ".join(f"{name} {factor:.2f}" for name, factor in self.factors.items())
        drafts = "".join(
            f"; {kind} drafts in {draft_ms:.1f} ms and {token_ms:.1f} ms for each token"
            for kind, (draft_ms, token_ms) in self.drafts.items()
        )
        return f"a verification of n tokens takes, in plain steps, {', '.join(shown)} ({self.clock} time; {factors}{drafts})"


def served_prices(prices: EnginePrices, served: Sequence[TimedRequest], *, has_one_loop: bool) -> EnginePrices:
    """The prices with the factors of served requests; one for both kinds of passes where too few verify drafts.

    Args:
        has_one_loop: whether passes over one token take the time of a plain server's.
    """
    rows = [
        (*prices.parts_ms(replayed), prices.clock_ms(answer) * prices.scale(plain))
        for answer, plain, replayed in served
    ]
    if sum(len(request.replayed.drafts) >= FEWEST for request in served) < FEWEST:
        slower = [ms / (plain + verifying) for plain, verifying, ms in rows]
        return replace(prices, factors=dict.fromkeys(ALONE, 1.0 if has_one_loop else float(np.median(slower or [1.0]))))
    rows += [(1.0, 0.0, 1.0)] * len(rows) if has_one_loop else []
    *amounts, ms = np.array(rows).T
    step, verification = robust_fit(amounts, ms, bounds=(0.5, 3.0))
    return replace(prices, factors={"step": step, "verification": verification})


def with_draft(prices: EnginePrices, head: Speculation, served: Sequence[TimedRequest]) -> EnginePrices:
    """The prices with the time of a head's drafts: what requests of servers of two depths took beside their passes.

    The plain answers beside all of them give one scale, their median: single answers vary by a tenth, and a mean of
    ratios to them would be too large.
    """
    rows = list[tuple[float, float, float, float]]()
    scale = np.median([prices.scale(request.plain) for request in served])
    for answer, _, replayed in served:
        verifications, drafted, _ = replayed.counts
        spent = scale * prices.clock_ms(answer) * replayed.num_tokens / max(1, len(answer.tokens) - 1)
        rows.append((verifications, drafted, prices.request_ms(replayed, head), spent))
    *amounts, passes_ms, ms = np.array(rows).T
    return replace(prices, drafts={**prices.drafts, head.type: robust_fit(amounts, ms, passes_ms)})


def robust_fit(
    amounts: Sequence[Floats],
    ms: Floats,
    other_ms: Floats | float = 0.0,
    *,
    bounds: tuple[float, float] = (0.0, math.inf),
) -> tuple[float, float]:
    """The time of each of two kinds of work, by the logarithm of the misfit of requests, some of which were
    disturbed: a relative one would favor short times.

    Args:
        amounts: of both kinds, each [requests].
        ms: times of the requests, [requests].
        other_ms: what other work took of them, [requests].
        bounds: of both times; work takes no negative time.
    """
    from scipy.optimize import least_squares  # takes a second to import

    def misfit(each: Floats) -> Floats:
        return np.log(each @ np.stack(amounts) + other_ms) - np.log(ms)

    first, second = least_squares(misfit, [1.0, 1.0], bounds=bounds, loss="cauchy", f_scale=MISFIT).x.tolist()
    return first, second
