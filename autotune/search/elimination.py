"""Finalists run against each other until one is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.documents.decoding_profile import AR
from autotune.evaluation.arms import Arm
from autotune.evaluation.runner import ArmRunner, Report
from autotune.evaluation.runs import Run
from autotune.workloads.workload import Workload

PROMPTS_PER_ROUND = 8  # prompts between two looks


MAX_PASSES = 4  # over the prompts


RISK = 0.05  # that any arm leaves by chance, over all looks and arms


@dataclass(frozen=True)
class Elimination:
    """Finalists after they ran against each other."""

    runs: dict[str, list[Run]]
    """By arm; an eliminated one has fewer. Plain decoding ran on all."""
    standing: list[str]
    """Arms that are not surely slower than the fastest; that one first."""


def eliminate(
    runner: ArmRunner,
    arms: Sequence[Arm],
    workload: Workload,
    *,
    seed: int = 0,
    deadline: float | None = None,
    report: Report | None = None,
) -> Elimination:
    """Arms decode the prompts block by block, beside plain decoding and each other; after each block those leave that are
    surely slower than the fastest. It ends when one is left, the prompts were read ``MAX_PASSES`` times, or where another
    block would not be over by the deadline.
    """
    standing = [arm.name for arm in arms]
    runs: dict[str, list[Run]] = {name: [] for name in (AR, *standing)}
    blocks = [
        workload.prompts[begin : begin + PROMPTS_PER_ROUND]
        for begin in range(0, len(workload.prompts), PROMPTS_PER_ROUND)
    ]
    total = len(workload.prompts) * MAX_PASSES
    began = time.monotonic()
    for number in range(MAX_PASSES * len(blocks)):
        prompts = blocks[number % len(blocks)]
        now = time.monotonic()
        is_late = deadline is not None and number > 0 and now + (now - began) / number > deadline
        if number > 0 and (len(standing) == 1 or is_late):
            break
        found = runner.compare(
            [runner.plain, *(arm for arm in arms if arm.name in standing)],
            Workload(workload.name, workload.split, prompts),
            seed=seed + number,
            min_prompts=len(prompts),
            repeat=number // len(blocks),
            keep_memory=number > 0,
        )
        for name, block_runs in found.items():
            runs[name] += block_runs
        if report is not None:
            report(min(total, len(runs[AR])), total)
        times = {name: np.array([run.decode_ms for run in runs[name]]) for name in standing}
        standing.sort(key=lambda name: float(times[name].sum()))
        fastest = times[standing[0]]
        num_tests = MAX_PASSES * len(blocks) * len(arms) * max(1, len(arms) - 1)  # any may look fastest by chance
        standing = [
            name
            for name in standing
            if name == standing[0] or not is_significantly_slower(times[name], fastest, risk=RISK / num_tests)
        ]
    return Elimination(runs, standing)


def is_significantly_slower(ms: NDArray[np.float64], than: NDArray[np.float64], *, risk: float) -> bool:
    """Whether an arm takes longer than another on the same prompts, by a one-sided paired t-test of log times.

    The test keeps its ``risk`` with the eight prompts of a block; a bootstrap of so few does not.
    """
    from scipy.stats import ttest_rel

    log_ratios = np.log(ms / than)
    if np.ptp(log_ratios) < 1e-12:  # the statistic needs a variance
        return bool(log_ratios[0] > 1e-12)
    return bool(ttest_rel(np.log(ms), np.log(than), alternative="greater").pvalue < risk)
