"""Runs in an engine for a search: servers in turns, prices, the self-test, the confirmation, requests at once. Loads no
torch.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.console import Console
from autotune.documents.engine_profile import (
    Clock,
    ConfirmedArm,
    ServedAnswer,
    ServedLoad,
    Speculation,
    SpeculationCounts,
    SpeculationType,
)
from autotune.engines.engine import EngineServer, ServingEngine
from autotune.engines.ngram_drafters import KnownRequest
from autotune.engines.ngram_replay import Replayed, RequestReplay, replay_speculation, total
from autotune.engines.verification_prices import PRICED_TOKENS, VerificationPrices
from autotune.errors import UserError
from autotune.evaluation.summary import bootstrap_ratio
from autotune.files import append_line, content_key, read_lines
from autotune.workloads.prompt import WorkloadPrompt

SELF_TEST = 4  # prompts
DISTURBED = 1.5  # times the usual time of a request in its arm, from which another process disturbed it
DISAGREEMENT = 0.05  # between speedups of wall and of CPU time, above which other processes used the machine
LOOKS = range(18, 1000, 6)  # numbers of prompts after which a confirmation may stop
WORTH = 1.01  # speedup on one side of which the interval lies then
OFF = "off"
Arms = Mapping[str, Sequence[Speculation]]


def labelled(one: Speculation | None) -> str:
    """The label of settings, marked where they are the default of their type."""
    return OFF if one is None else f"{one.label}, default" if one.is_default else one.label


def require_served(prompts: Sequence[WorkloadPrompt]) -> None:
    """Refuse prompts that a server of text at temperature 0 does not decode."""
    for prompt in prompts:
        if prompt.pixels:
            raise UserError(f"{prompt.name}: has an image, and n-grams are tuned on text; leave such prompts out")
        if prompt.settings.temperature > 0:
            raise UserError(f"{prompt.name}: engines are tuned at temperature 0; set the prompt's temperature to 0")


def with_replays(answers: Sequence[ServedAnswer], speculations: Sequence[Speculation], context: int) -> list[Replayed]:
    """Answers of a new server, beside their replay."""
    return list(zip(answers, replay_speculation(speculations, list(map(KnownRequest, answers)), context), strict=True))


def is_exact(answer: ServedAnswer, replayed: RequestReplay) -> bool:
    return (answer.drafted, answer.accepted) == (replayed.counts.drafted, replayed.counts.accepted)


@dataclass(frozen=True)
class ArmRuns:
    """Answers of settings in the order of the prompts, by the servers that gave them: a search that goes on starts a
    new one.
    """

    speculations: Sequence[Speculation]
    by_server: list[list[ServedAnswer]]
    counts: SpeculationCounts
    context: int

    @property
    def answers(self) -> list[ServedAnswer]:
        return list(itertools.chain(*self.by_server))

    @functools.cached_property
    def rows(self) -> list[Replayed]:
        return [row for found in self.by_server for row in with_replays(found, self.speculations, self.context)]

    @property
    def replayed(self) -> SpeculationCounts:
        return total(replayed.counts for _, replayed in self.rows)

    @property
    def exact(self) -> int:
        """Requests with the replay's counts; none where only the totals differ, because verifications are counted for
        all together.
        """
        found = sum(is_exact(*row) for row in self.rows)
        return found if found < len(self.rows) or self.replayed == self.counts else 0


def serve_in_turns(
    servers: ServingEngine | Mapping[str, EngineServer],
    arms: Arms,
    prompts: Sequence[WorkloadPrompt],
    stage: str,
    console: Console,
    *,
    seed: int = 0,
    record: Path | None = None,
    is_enough: Callable[[dict[str, ArmRuns]], bool] = lambda runs: False,
) -> dict[str, ArmRuns]:
    """Answers of every arm's server to the prompts, in turns and in random order.

    Args:
        servers: by arm, in a new state; or the engine that starts them, unless the record holds all prompts.
        record: keeps a prompt once every arm has answered it; those that it holds are not served again.
        is_enough: whether the other prompts are left out, asked after a number of prompts of ``LOOKS``.
    """
    order, process = random.Random(seed), os.urandom(8).hex()
    settings = {name: [one.model_dump() for one in speculations] for name, speculations in arms.items()}
    key = content_key([settings, [prompt.sha256 for prompt in prompts]])
    rows = [row for row in read_lines(record) if row.get("key") == key] if record else []

    def runs() -> dict[str, ArmRuns]:
        lives = [list(life) for _, life in itertools.groupby(rows, key=lambda row: row["process"])]
        return {
            name: ArmRuns(
                speculations,
                [[ServedAnswer.model_validate(row["answers"][name]) for row in life] for life in lives],
                total(SpeculationCounts.model_validate(life[-1]["counts"][name]) for life in lives),
                rows[0]["context"][name],
            )
            for name, speculations in arms.items()
        }

    rest = [] if len(rows) in LOOKS and is_enough(runs()) else prompts[len(rows) :]
    with ExitStack() as stack, console.stage(stage, len(prompts)) as update:
        if isinstance(servers, ServingEngine):
            asked, start = arms if rest else {}, servers.started
            servers = {name: stack.enter_context(start(one)) for name, one in asked.items()}
        for prompt in rest:
            answers = {}
            other = next((one for one in servers.values() if not one.keeps_answers), None)
            for name in order.sample(list(arms), len(arms)):
                answers[name] = servers[name].ask(prompt, other if servers[name].keeps_answers else None).model_dump()
                time.sleep(servers[name].spins_s if len(arms) > 1 else 0.0)
            counts = {name: server.counts().model_dump() for name, server in servers.items()}
            context = {name: server.context for name, server in servers.items()}
            rows.append({"key": key, "process": process, "answers": answers, "counts": counts, "context": context})
            if record:
                append_line(record, rows[-1])
            update(len(rows), len(prompts), "")
            if len(rows) in LOOKS and is_enough(runs()):
                break
    return runs()


def self_test(
    engine: ServingEngine,
    arms: Arms,
    servers: Mapping[str, EngineServer],
    prompts: Sequence[WorkloadPrompt],
    console: Console,
    record: Path,
) -> tuple[dict[str, ArmRuns], dict[SpeculationType, str]]:
    """Answers of new servers, and the types whose counts differ from the replay's, with the reason. Where those of a
    server of several types differ, each is served alone.
    """
    left_out: dict[SpeculationType, str] = {}
    runs = serve_in_turns(servers, arms, prompts, "self-test", console, record=record)
    for name, served in runs.items():
        console.say(
            f"self-test  {name}: draft tokens and accepted ones are the predicted in {sum(is_exact(*row) for row in served.rows)} of "
            f"{len(served.rows)} requests; {served.counts.verifications} verifications, {served.replayed.verifications} predicted"
        )
        alone = {name: served}
        if served.exact < len(served.rows) and len(served.speculations) > 1:
            each = {one.label: [one] for one in served.speculations}
            alone = serve_in_turns(engine, each, prompts, "self-test of each type", console)
        for label, one in alone.items():
            if len(one.speculations) == 1 and one.exact < (1 - engine.tolerated_mismatches) * len(one.rows):
                reason = f"{one.counts.text}; predicted are {one.replayed.text}"
                left_out[one.speculations[0].type] = reason
                console.say(f"self-test  {label}: {reason}: the build has another rule, and the type is left out")
    if len(left_out) == sum(map(len, arms.values())):
        raise UserError("the counts differ from the replay's in every type; use the build that docs/engines.md names")
    return runs, left_out


def confirm(
    engine: ServingEngine,
    arms: Arms,
    prompts: Sequence[WorkloadPrompt],
    prices: VerificationPrices,
    console: Console,
    *,
    seed: int,
    record: Path | None = None,
    stops_early: bool = False,
) -> tuple[list[ConfirmedArm], dict[str, ArmRuns]]:
    """Serve prompts with every arm, in turns and in random order, each in a new server of its own; prints a table.
    Returns the arms in their order, and their answers by name.

    Args:
        stops_early: leave out the other prompts once the interval of the fastest arm lies on one side of ``WORTH``.
    """

    def is_enough(runs: dict[str, ArmRuns]) -> bool:
        if not stops_early:
            return False
        low, high = max(compared(runs, prices)[1:], key=lambda arm: arm.measured).ci95
        return not low <= WORTH <= high

    runs = serve_in_turns(
        engine, arms, prompts, "confirmation in turns", console, seed=seed, record=record, is_enough=is_enough
    )
    confirmed = compared(runs, prices)
    if left_out := confirmed[0].prompts - confirmed[0].timed:
        console.say(f"prompts that do not count for times (a request took {DISTURBED:g} times the usual): {left_out}")
    if confirmed[0].clock != "wall":
        console.say(
            f"speedups of wall and of CPU time differ by more than {DISAGREEMENT:.0%}, because other processes used the machine: those of CPU "
            "time are given"
        )
    console.table(
        f"Confirmed on {confirmed[0].prompts} held-out prompts, {confirmed[0].clock} time",
        ["settings", "predicted", "measured", "95 %", "tokens per step", "counts = predicted", "plain's answer"],
        [
            [
                labelled(arm.speculation),
                *(f"{value:.2f}x" for value in (arm.predicted, arm.measured)),
                "{:.2f} to {:.2f}".format(*arm.ci95),
                f"{arm.tokens_per_step:.2f}",
                *("-" if number is None else f"{number}/{arm.prompts}" for number in (arm.exact, arm.identical)),
            ]
            for arm in confirmed
        ],
    )
    return confirmed, runs


def compared(runs: Mapping[str, ArmRuns], prices: VerificationPrices) -> list[ConfirmedArm]:
    """Speedups of runs over those without speculation, in time per token, beside their predictions. Prompts with a
    request that took ``DISTURBED`` times what is usual in its arm are left out, unless they are most.

    The clock is the wall's, unless a speedup in CPU time is another one; then other processes used the machine, and it
    is the CPU's.
    """
    longest = max(len(one.prompt_tokens) + len(one.tokens) for served in runs.values() for one in served.answers)
    price = prices.pricer(longest)

    def by_arm(of: Callable[[ServedAnswer, RequestReplay], float]) -> dict[str, NDArray[np.float64]]:
        return {name: np.array([of(*row) for row in one.rows], np.float64) for name, one in runs.items()}

    tokens, priced = by_arm(lambda _, replayed: max(1, replayed.num_tokens)), by_arm(lambda _, one: sum(price(one)))
    times = {"wall": by_arm(lambda one, _: one.wall_ms), "cpu": by_arm(lambda one, _: one.cpu_ms)}
    usual = np.ones(len(tokens[OFF]), bool)
    for name, ms in times["wall"].items():
        multiple = ms / np.where(priced[name], priced[name], np.nan)  # an answer of one token has no price
        usual &= ~(multiple > DISTURBED * np.nanmedian(multiple))
    usual |= 2 * usual.sum() < len(usual)

    def speedup(name: str, ms: Mapping[str, NDArray[np.float64]]) -> float:
        both = [ms[one][usual].sum() / tokens[one][usual].sum() for one in (OFF, name)]
        return float(both[0] / max(both[1], 1e-9))

    disagreements = [abs(speedup(name, times["wall"]) / max(speedup(name, times["cpu"]), 1e-9) - 1) for name in runs]
    clock: Clock = "cpu" if prices.clock == "cpu" and max(disagreements) > DISAGREEMENT else "wall"
    return [
        ConfirmedArm(
            label=name,
            speculation=next(iter(served.speculations), None),
            predicted=(prices.plain_factor if served.speculations else 1.0) * speedup(name, priced),
            measured=speedup(name, times[clock]),
            ci95=bootstrap_ratio(
                *(times[clock][one][usual] for one in (OFF, name)),
                above_units=tokens[OFF][usual],
                below_units=tokens[name][usual],
            ),
            clock=clock,
            tokens_per_step=tokens[name].sum() / sum(sum(one.steps.values()) for _, one in served.rows),
            replayed=served.replayed,
            counts=served.counts,
            exact=None if any(one.model for one in served.speculations) else served.exact,
            identical=sum(a.tokens == b.tokens for a, b in zip(served.answers, runs[OFF].answers, strict=True)),
            prompts=len(served.answers),
            timed=int(usual.sum()),
        )
        for name, served in runs.items()
    ]


def measure_loads(
    engine: ServingEngine, arms: Arms, answers: Sequence[ServedAnswer], size: int, console: Console
) -> list[ServedLoad]:
    """Serve the prompts of plain answers, ``size`` at a time, in a new server for every arm, one after the other;
    prints a table.
    """
    longest = max(len(one.prompt_tokens) + one.limit for one in answers) + PRICED_TOKENS[-1]  # with a draft
    loads = list[ServedLoad]()
    with console.stage("requests at once", len(arms)) as update:
        for number, name in enumerate(arms, start=1):
            with engine.started(arms[name], size, longest) as server:
                server.stream(answers[0].model_copy(update={"limit": 2}))
                started = time.perf_counter()
                with ThreadPoolExecutor(size) as pool:
                    found = list(pool.map(server.stream, answers))
                spent = time.perf_counter() - started
            first = [1e3 * times[0] for _, times in found]
            rest = [1e3 * (times[-1] - times[0]) / max(1, len(tokens) - 1) for tokens, times in found]
            load = ServedLoad(
                label=name,
                requests_at_once=size,
                requests=len(found),
                tokens=sum(len(tokens) for tokens, _ in found),
                seconds=spent,
                first_token_ms=tuple(np.percentile(first, [50, 95]).tolist()),
                token_ms=tuple(np.percentile(rest, [50, 95]).tolist()),
                identical=sum(tokens == one.tokens for (tokens, _), one in zip(found, answers, strict=True)),
            )
            loads.append(load)
            update(number, len(arms), "")
    console.table(
        f"{len(answers)} requests, prompts read in their time; median and 95th percentile of requests",
        ["settings", "at once", "tokens/s", "of off", "first token, ms", "output token, ms", "plain's answer"],
        [
            [
                load.label,
                f"{load.requests_at_once}",
                f"{load.tokens / load.seconds:.1f}",
                f"{load.tokens / load.seconds * loads[0].seconds / loads[0].tokens:.2f}x",
                *("{:.0f}, {:.0f}".format(*ms) for ms in (load.first_token_ms, load.token_ms)),
                f"{load.identical}/{load.requests}",
            ]
            for load in loads
        ],
    )
    return loads
