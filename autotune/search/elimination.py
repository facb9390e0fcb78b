"""Sequential elimination: arms decode the same prompts until the fastest is known.

Candidates leave when they are significantly slower than the fastest arm. Published defaults leave only when they are
significantly slower than the fastest default, so that the best default is known as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.documents.decoding_profile import AR
from autotune.evaluation.arms import Arm
from autotune.evaluation.runner import ArmRunner, Report
from autotune.evaluation.runs import Run
from autotune.workloads.workload import Workload

PROMPTS_PER_ROUND = 8  # prompts between two interim analyses
MIN_PROMPTS = 4  # even past the deadline
MAX_PASSES = 4  # over the prompts
RISK = 0.05  # that any arm is eliminated by chance at an interim analysis


@dataclass(frozen=True)
class Elimination:
    """Runs of all arms, and the arms that were not eliminated."""

    runs: dict[str, list[Run]]
    """By arm name; eliminated arms have fewer runs. Plain decoding has run on all prompts."""
    remaining: list[str]
    """Names of candidates that are not significantly slower than the fastest arm, the fastest candidate first."""
    remaining_defaults: list[str]
    """Names of defaults that are not significantly slower than the fastest default, which is first."""


def eliminate(
    runner: ArmRunner,
    arms: Sequence[Arm],
    workload: Workload,
    *,
    defaults: Sequence[Arm] = (),
    prompts_per_round: int = PROMPTS_PER_ROUND,
    seed: int = 0,
    deadline: float | None = None,
    report: Report | None = None,
) -> Elimination:
    """Run candidates and defaults beside plain decoding, and eliminate those that are significantly slower.

    It ends when one candidate remains and the defaults are eliminated down to one or are significantly slower than it, after
    ``MAX_PASSES`` over the prompts, or when the next round of prompts would end after the deadline.

    Args:
        arms: the candidates.
        defaults: arms that compete among themselves.
        prompts_per_round: number of prompts between two interim analyses.
        deadline: of ``time.monotonic``. After ``MIN_PROMPTS`` prompts, no prompt is begun that would end later.
    """
    names, default_names = [arm.name for arm in arms], [arm.name for arm in defaults]
    runs: dict[str, list[Run]] = {name: [] for name in (AR, *names, *default_names)}
    num_prompts = len(workload.prompts)
    blocks = [workload.prompts[begin : begin + prompts_per_round] for begin in range(0, num_prompts, prompts_per_round)]
    began = time.monotonic()
    for number in range(MAX_PASSES * len(blocks)):
        prompts = blocks[number % len(blocks)]
        now = time.monotonic()
        is_late = deadline is not None and number > 0 and now + (now - began) / number > deadline
        if is_late or (number > 0 and _is_decided(runs, names, default_names)):
            break
        block_runs = runner.compare(
            [runner.plain, *(arm for arm in (*arms, *defaults) if arm.name in {*names, *default_names})],
            Workload(workload.name, workload.split, prompts),
            seed=seed + number,
            deadline=deadline,
            min_prompts=MIN_PROMPTS if number == 0 else len(prompts),
            repeat=number // len(blocks),
            keep_memory=number > 0,
        )
        for name, more in block_runs.items():
            runs[name] += more
        if report is not None:
            report(min(num_prompts * MAX_PASSES, len(runs[AR])), num_prompts * MAX_PASSES)
        all_names = [*names, *default_names]
        names = not_slower(runs, names, all_names)
        default_names = not_slower(runs, default_names, default_names) if default_names else []
    return Elimination(runs, names, default_names)


def not_slower(runs: Mapping[str, Sequence[Run]], names: Sequence[str], rivals: Sequence[str]) -> list[str]:
    """The arms that are not significantly slower than the fastest rival, the fastest first. All have run equally often.

    The risk of a comparison is ``RISK`` divided by the number of arms that are compared with the fastest (Bonferroni).
    """
    risk = RISK / max(1, len({*names, *rivals}) - 1)
    ms = {name: _decode_ms(runs[name]) for name in (*names, *rivals)}
    fastest = min(rivals, key=lambda name: float(ms[name].sum()))
    by_speed = sorted(names, key=lambda name: float(ms[name].sum()))
    return [n for n in by_speed if n == fastest or not is_significantly_slower(ms[n], ms[fastest], risk=risk)]


def _is_decided(runs: Mapping[str, Sequence[Run]], names: Sequence[str], default_names: Sequence[str]) -> bool:
    """Whether more runs could not change which arm is the fastest."""
    if len(names) + len(default_names) == 1:
        return True
    if len(names) != 1:
        return False
    ms = _decode_ms(runs[names[0]])
    risk = RISK / max(1, len(default_names))
    return all(is_significantly_slower(_decode_ms(runs[name]), ms, risk=risk) for name in default_names)


def _decode_ms(runs: Sequence[Run]) -> NDArray[np.float64]:
    return np.array([run.decode_ms for run in runs])


def is_significantly_slower(ms: NDArray[np.float64], than: NDArray[np.float64], *, risk: float) -> bool:
    """Whether an arm takes longer than another on the same prompts, by a one-sided paired t-test of log times.

    The test keeps its ``risk`` with the eight prompts of a block; a bootstrap of so few does not.
    """
    from scipy.stats import ttest_rel

    log_ratios = np.log(ms / than)
    if np.ptp(log_ratios) < 1e-12:  # the statistic needs a variance
        return bool(log_ratios[0] > 1e-12)
    return bool(ttest_rel(np.log(ms), np.log(than), alternative="greater").pvalue < risk)
