"""Runs of prompts in serving engines: prompt by prompt with their rounds, and several requests at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from autotune.console import Console, Update
from autotune.serving.client import Counters, EngineAnswer, EngineClient
from autotune.serving.prediction import PredictedPrompt

EngineArm = Callable[[], AbstractContextManager[EngineClient]]
"""Opens an engine: starts it, or connects to one that runs."""


@dataclass(frozen=True)
class PromptRun:
    """One prompt in an engine that decoded nothing else."""

    answer: EngineAnswer
    counts: Counters


@dataclass(frozen=True)
class Throughput:
    """An engine on all prompts, with a number of requests at a time. Seconds include prefills."""

    requests_at_once: int
    requests: int
    tokens: int
    rounds: int | None
    """Verifications of drafts; None where the engine does not speculate."""
    seconds: float

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class EngineRuns:
    engine: EngineClient
    prompts: list[PromptRun] = field(default_factory=list)
    """In the order of the prompts."""
    speeds: list[Throughput] = field(default_factory=list)


def measure_engines(
    arms: Mapping[str, EngineArm],
    predicted: Sequence[PredictedPrompt],
    requests_at_once: Sequence[int],
    console: Console,
    *,
    interleaved: bool,
) -> dict[str, EngineRuns]:
    """Decode the prompts in every engine, one at a time, and then with each number of ``requests_at_once`` above 1.

    With ``interleaved`` all engines are open at once and take turns prompt by prompt, in random order.
    """
    groups = [list(arms)] if interleaved else [[arm] for arm in arms]
    runs_by_arm: dict[str, EngineRuns] = {}
    for group in groups:
        with ExitStack() as stack:
            runs = {arm: EngineRuns(stack.enter_context(arms[arm]())) for arm in group}
            for arm_runs in runs.values():
                warm_up(arm_runs.engine, predicted)
            with console.stage(f"{' and '.join(group)}, prompt by prompt") as update:
                _one_at_a_time(runs, predicted, update)
            for at_once in requests_at_once:
                for arm_runs in runs.values() if at_once > 1 else ():
                    arm_runs.speeds.append(throughput(arm_runs.engine, predicted, at_once))
        runs_by_arm |= runs
    return runs_by_arm


def warm_up(engine: EngineClient, predicted: Sequence[PredictedPrompt]) -> None:
    """Decode the first prompt with an image and the first without."""
    before, num_tokens = engine.counters(), 0
    for prompt in {bool(prompt.prompt.pixels): prompt for prompt in reversed(predicted)}.values():
        num_tokens += len(engine.answer(prompt.prompt, prompt.prompt_tokens).tokens)
    engine.counters_after(before, num_tokens)


def _one_at_a_time(runs: Mapping[str, EngineRuns], predicted: Sequence[PredictedPrompt], update: Update) -> None:
    order = random.Random(0)
    for done, prompt in enumerate(predicted, start=1):
        for arm in order.sample(list(runs), len(runs)):
            engine = runs[arm].engine
            before = engine.counters()
            answer = engine.answer(prompt.prompt, prompt.prompt_tokens)
            runs[arm].prompts.append(PromptRun(answer, engine.counters_after(before, len(answer.tokens))))
        update(done, len(predicted), "")
    for arm_runs in runs.values():
        rounds = [run.counts.rounds or 0 for run in arm_runs.prompts]
        tokens = [len(run.answer.tokens) for run in arm_runs.prompts]
        seconds = sum(run.answer.seconds for run in arm_runs.prompts)
        arm_runs.speeds.append(Throughput(1, len(predicted), sum(tokens), sum(rounds) or None, seconds))


def throughput(engine: EngineClient, predicted: Sequence[PredictedPrompt], at_once: int) -> Throughput:
    before = engine.counters()
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda prompt: engine.answer(prompt.prompt, prompt.prompt_tokens), predicted))
    seconds = time.perf_counter() - started
    num_tokens = sum(len(answer.tokens) for answer in answers)
    counts = engine.counters_after(before, num_tokens)
    return Throughput(at_once, len(predicted), num_tokens, counts.rounds or None, seconds)
