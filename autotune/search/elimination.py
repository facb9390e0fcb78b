"""Sequential elimination: arms decode the same prompts until one remains."""

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

PROMPTS_PER_ROUND = 8  # prompts between two interim analyses
MAX_PASSES = 4  # over the prompts
RISK = 0.05  # that any arm is eliminated by chance, over all interim analyses and arms


@dataclass(frozen=True)
class Elimination:
    """Runs of all arms, and the arms that were not eliminated."""

    runs: dict[str, list[Run]]
    """By arm name; eliminated arms have fewer runs. Plain decoding has run on all prompts."""
    remaining: list[str]
    """Names of arms that are not significantly slower than the fastest, which is first."""


def eliminate(
    runner: ArmRunner,
    arms: Sequence[Arm],
    workload: Workload,
    *,
    seed: int = 0,
    deadline: float | None = None,
    report: Report | None = None,
) -> Elimination:
    """Run arms beside plain decoding, and eliminate those that are significantly slower than the fastest.

    It ends when one arm remains, after ``MAX_PASSES`` over the prompts, or when the next round of prompts would end after
    the deadline.
    """
    remaining = [arm.name for arm in arms]
    runs: dict[str, list[Run]] = {name: [] for name in (AR, *remaining)}
    num_prompts = len(workload.prompts)
    blocks = [workload.prompts[begin : begin + PROMPTS_PER_ROUND] for begin in range(0, num_prompts, PROMPTS_PER_ROUND)]
    # Any arm may look fastest by chance: a test for every ordered pair of arms at every interim analysis.
    num_tests = MAX_PASSES * len(blocks) * len(arms) * max(1, len(arms) - 1)
    began = time.monotonic()
    for number in range(MAX_PASSES * len(blocks)):
        prompts = blocks[number % len(blocks)]
        now = time.monotonic()
        is_late = deadline is not None and number > 0 and now + (now - began) / number > deadline
        if number > 0 and (len(remaining) == 1 or is_late):
            break
        block_runs = runner.compare(
            [runner.plain, *(arm for arm in arms if arm.name in remaining)],
            Workload(workload.name, workload.split, prompts),
            seed=seed + number,
            min_prompts=len(prompts),
            repeat=number // len(blocks),
            keep_memory=number > 0,
        )
        for name, more in block_runs.items():
            runs[name] += more
        if report is not None:
            report(min(num_prompts * MAX_PASSES, len(runs[AR])), num_prompts * MAX_PASSES)
        ms = {name: np.array([run.decode_ms for run in runs[name]]) for name in remaining}
        fastest, *others = sorted(remaining, key=lambda name: float(ms[name].sum()))
        slower = [name for name in others if is_significantly_slower(ms[name], ms[fastest], risk=RISK / num_tests)]
        remaining = [name for name in (fastest, *others) if name not in slower]
    return Elimination(runs, remaining)


def is_significantly_slower(ms: NDArray[np.float64], than: NDArray[np.float64], *, risk: float) -> bool:
    """Whether an arm takes longer than another on the same prompts, by a one-sided paired t-test of log times.

    The test keeps its ``risk`` with the eight prompts of a block; a bootstrap of so few does not.
    """
    from scipy.stats import ttest_rel

    log_ratios = np.log(ms / than)
    if np.ptp(log_ratios) < 1e-12:  # the statistic needs a variance
        return bool(log_ratios[0] > 1e-12)
    return bool(ttest_rel(np.log(ms), np.log(than), alternative="greater").pvalue < risk)
