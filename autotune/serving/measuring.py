"""Runs of prompts in serving engines: prompt by prompt with their rounds, and several requests at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from autotune.console import Console
from autotune.serving.client import Counters, EngineAnswer, EngineClient
from autotune.serving.prediction import PredictedPrompt


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
    rounds: int
    """Verifications of drafts; 0 where the engine does not speculate."""
    seconds: float

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class EngineRuns:
    engine: EngineClient
    prompts: list[PromptRun]
    """In the order of the prompts."""
    speeds: list[Throughput]


def measure_engines(
    arms: Mapping[str, AbstractContextManager[EngineClient]],
    predicted: Sequence[PredictedPrompt],
    requests_at_once: Sequence[int],
    console: Console,
) -> dict[str, EngineRuns]:
    """Decode the prompts in one engine after the other, one at a time, and then with each number of ``requests_at_once`` above 1."""
    runs = {}
    for name, arm in arms.items():
        with arm as engine:
            warm_up(engine, predicted)
            with console.stage(f"{name}, prompt by prompt") as update:
                prompts = []
                for prompt in predicted:
                    before = engine.counters()
                    answer = engine.complete(prompt.prompt, prompt.prompt_tokens)
                    prompts.append(PromptRun(answer, engine.counters_after(before, len(answer.tokens))))
                    update(len(prompts), len(predicted), "")
            tokens, rounds = (sum(getattr(run.counts, count) for run in prompts) for count in ("generated", "rounds"))
            one = Throughput(1, len(predicted), tokens, rounds, sum(run.answer.seconds for run in prompts))
            more = [throughput(engine, predicted, at_once) for at_once in requests_at_once if at_once > 1]
        runs[name] = EngineRuns(engine, prompts, [one, *more])
    return runs


def warm_up(engine: EngineClient, predicted: Sequence[PredictedPrompt]) -> None:
    """Decode the first prompt with an image and the first without."""
    before, num_tokens = engine.counters(), 0
    for prompt in {bool(prompt.prompt.pixels): prompt for prompt in reversed(predicted)}.values():
        num_tokens += len(engine.complete(prompt.prompt, prompt.prompt_tokens).tokens)
    engine.counters_after(before, num_tokens)


def throughput(engine: EngineClient, predicted: Sequence[PredictedPrompt], at_once: int) -> Throughput:
    before = engine.counters()
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda prompt: engine.complete(prompt.prompt, prompt.prompt_tokens), predicted))
    seconds = time.perf_counter() - started
    num_tokens = sum(len(answer.tokens) for answer in answers)
    counts = engine.counters_after(before, num_tokens)
    return Throughput(at_once, len(predicted), num_tokens, counts.rounds, seconds)
