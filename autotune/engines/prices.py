"""Prices of an engine's forward passes by the number of tokens verified, from one server. Loads no torch."""

from __future__ import annotations

import functools
import math
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from autotune.console import Update
from autotune.documents.deployment import PricedStep
from autotune.engines.backend import Prices
from autotune.engines.engine_server import EngineServer
from autotune.engines.replay import CONTEXT_STEP, EngineSteps, RequestReplay
from autotune.engines.served import Served
from autotune.errors import UserError
from autotune.trees.limits import Floats

Clock = Literal["wall", "cpu"]
PRICED_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
REPEATS = 3
CPU_RATIO = 4  # of CPU times of the longest verification and of a plain pass, above which the CPU computes them
MISFIT = 0.05  # of a request's time to its price, beyond which it counts less
FEWEST = 3  # verifications of a request, and such requests, that refit prices
Pairs = Sequence[tuple[Served, RequestReplay]]


def measure_verifications(
    server: EngineServer, prompts: Sequence[list[int]], update: Update, *, seed: int, until: float = math.inf
) -> list[PricedStep]:
    """Time one verification of each length after each prompt, in random order.

    Args:
        until: time of ``time.monotonic()`` after which no repetition begins, apart from the first that counts.

    Raises:
        UserError: the server drafts other numbers of tokens.
    """
    samples = defaultdict[tuple[int, int], list[Served]](list)
    order, lengths = random.Random(seed), [n for n in PRICED_TOKENS if n <= server.longest]
    passes = [(prompt, number) for prompt in prompts for number in range(REPEATS + 1)]
    for done, (prompt, number) in enumerate(passes, start=1):
        if number > 1 and time.monotonic() > until:
            continue
        # After the first, the prompt is in the KV cache.
        for n in (1, *order.sample(lengths, len(lengths))):
            answer = server.verify(prompt, n)
            if (answer.verified_nodes, len(answer.tokens)) != (n - 1, n + 1):
                raise UserError(
                    f"{server.url}: a request for one verification of {n} tokens drafted {answer.verified_nodes}; start the server with "
                    f"{server.priced_by}"
                )
            samples[n, len(prompt)].append(answer)
        update(done, len(passes))
    # The first pass builds the server's graphs. A prompt's first request of one token reads it.
    return [
        PricedStep(
            tokens=n,
            context=context,
            wall_ms=[one.decode_ms for one in found[1:][-REPEATS:]],
            cpu_ms=[one.cpu_ms for one in found[1:][-REPEATS:]],
        )
        for (n, context), found in samples.items()
    ]


@dataclass(frozen=True)
class EnginePrices(Prices):
    """Milliseconds of a forward pass by tokens read and tokens before them, interpolated between medians."""

    priced: Sequence[PricedStep]
    left_out: Mapping[str, str] = field(default_factory=dict)
    factor: float = 1.0
    """Multiplies the prices of passes that verify a draft (``served_prices``)."""
    step_factor: float = 1.0
    """Multiplies the prices of passes over one token."""
    plain_factor: float = 1.0
    """Multiplies those too without speculation, where the engine runs another loop then."""
    draft_ms: tuple[float, float] = (0.0, 0.0)
    """Added by a draft model to a verification, and for each draft token."""
    _known: dict[tuple[int, int], float] = field(init=False, default_factory=dict)

    @functools.cached_property
    def clock(self) -> Clock:
        """The CPU's where the engine computes on it, so that long verifications take its time; else the wall's."""
        least, most = (
            np.median([ms for step in self.priced if step.tokens == n for ms in step.cpu_ms])
            for n in (1, max(step.tokens for step in self.priced))
        )
        return "cpu" if most > CPU_RATIO * least > 0 else "wall"

    @property
    def factors(self) -> Mapping[str, float]:  # type: ignore[override]
        names = ("verification", "step", "plain", "draft_round_ms", "draft_token_ms")
        return dict(zip(names, (self.factor, self.step_factor, self.plain_factor, *self.draft_ms), strict=True))

    def pass_ms(self, tokens: int, context: float) -> float:
        """Beyond the longest verification that was priced, on the line through it and the last but two."""
        at_contexts = list[float]()
        for numbers, times in self._measured.values():
            slope = (times[-1] - times[-3:][0]) / max(1, numbers[-1] - numbers[-3:][0])
            at_contexts.append(np.interp(tokens, numbers, times) + slope * max(0, tokens - numbers[-1]))
        ms = float(np.interp(context, list(self._measured), at_contexts))
        return ms * (self.factor if tokens > 1 else self.step_factor)

    @functools.cached_property
    def _measured(self) -> dict[int, Floats]:
        """Numbers of tokens, in their order, and median times, by context."""
        rows = defaultdict[int, list[tuple[int, float]]](list)
        for step in sorted(self.priced, key=lambda step: (step.context, step.tokens)):
            ms = step.wall_ms if self.clock == "wall" else step.cpu_ms
            rows[step.context].append((step.tokens, float(np.median(ms))))
        return {context: np.array(row).T for context, row in rows.items()}

    def parts_ms(self, request: RequestReplay, *, has_model: bool = False) -> tuple[float, float]:
        """The time of a request's plain passes, and that of its verifications with a draft model's time."""
        plain, verifying = 0.0, 0.0
        for (tokens, unit), number in request.passes.items():
            if (tokens, unit) not in self._known:
                self._known[tokens, unit] = self.pass_ms(tokens, (unit + 0.5) * CONTEXT_STEP)
            ms = number * self._known[tokens, unit]
            plain, verifying = (plain + ms, verifying) if tokens == 1 else (plain, verifying + ms)
        if has_model:
            rounds, drafted, _ = request.counts
            verifying += rounds * self.draft_ms[0] + drafted * self.draft_ms[1]
        return plain, verifying

    def ms(self, steps: EngineSteps) -> Floats:
        """See ``Prices.ms``. A token of a request without passes takes the mean time of the others' tokens."""
        has_model = bool(steps.speculation and steps.speculation.model)
        factor = 1.0 if steps.speculation else self.plain_factor
        is_known = np.array([one.num_tokens > 0 for one in steps.requests])
        parts = [sum(self.parts_ms(one, has_model=has_model)) / max(1, one.num_tokens) for one in steps.requests]
        per_token = np.array(parts)
        per_token[~is_known] = per_token[is_known].mean()
        return factor * per_token * np.array(steps.new_tokens)

    def time_of(self, answer: Served) -> float:
        """The time of an answer on the prices' clock."""
        return answer.decode_ms if self.clock == "wall" else answer.cpu_ms

    def text(self, *, has_one_loop: bool) -> str:
        """The prices in one line, in plain steps."""
        context = float(np.median([step.context for step in self.priced]))
        most = max(step.tokens for step in self.priced)
        step_ms = self.pass_ms(1, context)
        shown = [f"{n}: {self.pass_ms(n, context) / step_ms:.1f}" for n in (2, 4, 8, 16, most)]
        plain = "" if has_one_loop else f"; a step without speculation {self.plain_factor:.2f}"
        return (
            f"a verification of n tokens takes, in plain steps, {', '.join(shown)} ({self.clock} time; verifications take "
            f"{self.factor:.2f} times what they take alone, steps {self.step_factor:.2f}){plain}"
        )


def served_prices(prices: EnginePrices, plain: Pairs, served: Pairs, *, has_one_loop: bool) -> EnginePrices:
    """The prices with the factors of served requests: a robust fit to the times of those that verify drafts, and of
    those without speculation too in an engine that ``has_one_loop``. Where too few verify drafts, both kinds of passes
    have one factor.
    """
    from scipy.optimize import least_squares  # takes a second to import

    off, drafting = (
        [(*prices.parts_ms(replayed), prices.time_of(answer)) for answer, replayed in pairs if replayed.num_tokens]
        for pairs in (plain, served)
    )
    alone = float(np.median([ms / priced for priced, _, ms in off]))
    step = factor = alone if has_one_loop else 1.0
    if sum(len(replayed.drafts) >= FEWEST for _, replayed in served) >= FEWEST:
        rows = np.array([*drafting, *(off if has_one_loop else ())])
        misfit = lambda factors: rows[:, :2] @ factors / rows[:, 2] - 1  # noqa: E731
        step, factor = least_squares(misfit, [1.0, 1.0], bounds=(0.5, 3.0), loss="soft_l1", f_scale=MISFIT).x.tolist()
    return replace(prices, factor=factor, step_factor=step, plain_factor=1.0 if has_one_loop else alone / step)


def with_draft(prices: EnginePrices, served: Sequence[Pairs]) -> EnginePrices:
    """The prices with the time of a draft model, by requests of two servers that drafted other numbers of tokens: what
    a round takes beside its verification (medians over requests) is linear in the draft tokens.
    """
    points = []
    for pairs in served:
        drafting = [(prices.time_of(one) - sum(prices.parts_ms(found)), found.counts) for one, found in pairs]
        if not (drafting := [(ms, counts) for ms, counts in drafting if counts[0]]):
            return prices
        rounds = np.median([ms / counts[0] for ms, counts in drafting])
        points.append((drafting[0][1][1] / drafting[0][1][0], float(rounds)))
    (short, short_ms), (long, long_ms) = sorted(points)
    token_ms = max(0.0, (long_ms - short_ms) / (long - short))
    return replace(prices, draft_ms=(max(0.0, short_ms - short * token_ms), token_ms))
