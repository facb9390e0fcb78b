"""Jobs of a measurement, their log, and what their samples say.

A job is plain steps or rounds, timed in one go; a ``Bench`` runs and times their single steps. The timed steps of an
unfinished cost table are kept in a JSON Lines file as they come.

A sample is the product of the latency of its size, of an effect of its job (the plain steps beside it are noisy too,
and a burst of another process lasts longer than a step), and of noise with heavy tails. All three are estimated
together, by iteratively reweighted least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import ValidationError

from autotune.cost.surface import Observation, robust_deviation, robust_weights
from autotune.files import Document, append_line, read_lines
from autotune.measuring.settings import Size
from autotune.trees.limits import Floats

PLAIN_STEPS = 3  # timed in a row, after warm-ups
PLAIN_WARM_UPS = 8
SLOW_STEP_MS = 30.0
"""A model whose plain steps take longer does not fit into caches. It needs fewer warm-ups, and no untimed rounds."""


class Bench(Protocol):
    """Times single steps of a target and one draft, in milliseconds."""

    def decode_ms(self, kv_length: int) -> float:
        """A plain step."""

    def verify_ms(self, tokens: int, kv_length: int) -> float:
        """A verification."""

    def draft_first_ms(self, tokens: int, kv_length: int) -> float:
        """The draft's first forward of a round."""

    def draft_level_ms(self, tokens: int, kv_length: int) -> float:
        """Another draft level."""


def plain_steps_ms(bench: Bench, kv_length: int) -> list[float]:
    """Times of consecutive plain steps, as in plain decoding, after untimed ones."""
    for _ in range(PLAIN_WARM_UPS):
        if bench.decode_ms(kv_length) > SLOW_STEP_MS:
            break
    return [bench.decode_ms(kv_length) for _ in range(PLAIN_STEPS)]


@dataclass(frozen=True)
class TimedRound:
    """Verification, the draft's first forward, draft levels. Without a size, a step is run small and untimed."""

    verify: Size | None
    draft_first: Size | None
    draft_levels: tuple[Size | None, ...]


@dataclass(frozen=True)
class Job:
    """Consecutive rounds of a draft, after untimed ones; or consecutive plain steps at a KV length."""

    draft: int | None = None
    rounds: tuple[TimedRound, ...] = ()
    kv_length: int = 0


Samples = list[tuple[str, int, int, float]]
"""(part, tokens, KV length, ms) per sample."""


class TimedJob(Document):
    """The samples of a job, and the plain steps before and after it."""

    plain_ms: tuple[float, float]
    samples: Samples
    draft: int | None = None
    """Index of the draft whose rounds were timed; None for plain steps."""

    @property
    def reference_ms(self) -> float:
        """The plain step that the samples are relative to: the geometric mean of both."""
        return math.sqrt(self.plain_ms[0] * self.plain_ms[1])


class JobLog:
    """Timed jobs of one table, from which an interrupted measurement continues. Lines that a crash has left incomplete,
    or another version has written, are skipped.

    Samples are multiples of the plain steps before and after them, so jobs of another hour, when the machine was faster
    or slower, serve as well as new ones.

    Args:
        path: file of the log, named by all that determines the sizes and the models.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        first, *others = read_lines(path) or [{}]
        self.is_begun = "threads" in first
        self.threads: int | None = first.get("threads")
        """CPU threads of all steps; None for torch's default."""
        self.jobs: list[TimedJob] = []
        for line in others if self.is_begun else ():
            with suppress(ValidationError):
                self.jobs.append(TimedJob.model_validate(line, strict=False))

    def begin(self, threads: int | None) -> None:
        """Write the first line."""
        self.is_begun, self.threads = True, threads
        append_line(self.path, {"threads": threads})

    def append(self, jobs: Sequence[TimedJob]) -> None:
        append_line(self.path, *(job.model_dump(mode="json") for job in jobs))


ITERATIONS = 3
LEAST_MS = 1e-6  # a draft that runs no model may take less than the clock resolves
LEAST_DEVIATION = 0.003  # of samples of one kind
LEAST_JOB_DEVIATION = 0.005
DRAFT_DEVIATION = 0.03  # of verifications after one draft from those after the others, before anything is measured

Key = tuple[str, Size]
"""Part of the table, and size."""
Predict = Callable[[dict[Key, Observation]], dict[Key, float]]
"""Predicted latencies of observed sizes, given all observations."""


@dataclass(frozen=True)
class Observations:
    """Latencies of all sizes by the samples of a table, in plain steps."""

    by_size: dict[Key, Observation]
    verify_ratios: dict[int, tuple[float, float]]
    """Verification between rounds of each draft as a multiple of the mean over drafts, with its relative standard
    error; both are pooled towards the mean: a draft with few or noisy samples has 1.
    """


def observe(jobs: Sequence[TimedJob], predict: Predict, *, verify: str, iterations: int = ITERATIONS) -> Observations:
    """Reduce the samples of jobs.

    Args:
        predict: the joint fit, which tells an outlier of a size with few samples.
        verify: the part of verifications.
        iterations: the first one starts from the medians of the sizes, and needs no fit.
    """
    rows = [
        ((part, (tokens, kv_length)), number, math.log(max(ms, LEAST_MS) / job.reference_ms))
        for number, job in enumerate(jobs)
        for part, tokens, kv_length, ms in job.samples
    ]
    numbers: dict[Key, int] = {}
    of_size = np.array([numbers.setdefault(key, len(numbers)) for key, *_ in rows])
    of_job = np.array([number for _, number, _ in rows])
    of_draft = np.array([-1 if jobs[number].draft is None else jobs[number].draft for number in of_job])
    logs = np.array([log for *_, log in rows])
    kinds = np.unique([key[0].partition(" ")[0] for key, *_ in rows], return_inverse=True)[1]
    is_verify = np.array([key[0] == verify for key, *_ in rows])

    expected = np.array([np.median(logs[of_size == number]) for number in range(len(numbers))])
    job_effect, draft_effect = np.zeros(len(jobs)), np.zeros(len(logs))
    ratios: dict[int, tuple[float, float]] = {}
    by_size: dict[Key, Observation] = {}
    for number in range(iterations):
        residuals = logs - expected[of_size] - draft_effect
        inside = residuals - job_effect[of_job]
        deviations = np.array(
            [max(LEAST_DEVIATION, robust_deviation(inside[kinds == k])) for k in range(kinds.max() + 1)]
        )
        weights = robust_weights(inside / deviations[kinds]) / np.square(deviations[kinds])
        job_weights = np.bincount(of_job, weights, len(jobs))
        job_sums = np.bincount(of_job, weights * residuals, len(jobs))
        has_samples = job_weights > 0
        means = job_sums[has_samples] / job_weights[has_samples]
        between = max(LEAST_JOB_DEVIATION, robust_deviation(means))
        # A job in a burst is farther from the others than they are from each other: it counts for less.
        burst = np.ones(len(jobs))
        burst[has_samples] = robust_weights(means / between)
        job_effect = job_sums / (job_weights + burst / between**2)
        weights *= np.minimum(1.0, burst[of_job])
        ratios, draft_effect = _of_drafts(
            logs - expected[of_size] - job_effect[of_job], weights, of_draft, of_job, is_verify, between
        )
        sums = np.bincount(of_size, weights)
        observed = np.bincount(of_size, weights * (logs - job_effect[of_job] - draft_effect)) / sums
        errors = np.sqrt(1 / sums)
        by_size = {
            key: Observation(ms=math.exp(observed[number]), error=float(errors[number]))
            for key, number in numbers.items()
        }
        if number == iterations - 1:
            break
        predicted = predict(by_size)
        expected = np.array([math.log(predicted[key]) for key in numbers])
    return Observations(by_size, ratios)


def _of_drafts(
    residuals: Floats, weights: Floats, of_draft: Floats, of_job: Floats, is_verify: Floats, between: float
) -> tuple[dict[int, tuple[float, float]], Floats]:
    """Ratios of the verifications of each draft to the mean, and the effect of its draft on every sample."""
    effects = np.zeros(len(residuals))
    found: dict[int, tuple[float, float]] = {}
    drafts = [int(draft) for draft in np.unique(of_draft[is_verify]) if draft >= 0]
    for draft in drafts if len(drafts) > 1 else ():
        rows = is_verify & (of_draft == draft)
        weight = float(weights[rows].sum())
        # Errors of a job's plain steps are common to its samples, whose number does not reduce them.
        variance = 1 / weight + between**2 / len(np.unique(of_job[rows]))
        share = DRAFT_DEVIATION**2 / (DRAFT_DEVIATION**2 + variance)
        effect = share * float((weights[rows] * residuals[rows]).sum()) / weight
        found[draft] = math.exp(effect), math.sqrt(share * variance)
        effects[rows] = effect
    return found, effects
