"""The tuning prompts, split into those that choose trees and those that confirm the choice, and intervals of
predictions on them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.replay.draws import speedup_draws
from autotune.replay.evaluator import Evaluator
from autotune.search.thresholds import CONFIDENCE, CONFIRMING, DECODING_ERROR, MIN_CONFIRMING, MIN_SPLIT
from autotune.workloads.workload import Workload


@dataclass(frozen=True)
class TuningPrompts:
    """The tuning prompts, and their split: trees are chosen on some of them, and the choice is confirmed on the others.

    The fastest of thousands of configurations on some prompts is partly the fastest by chance (the winner's curse).
    Prompts that did not take part in the choice predict its speed without this bias.
    """

    workload: Workload
    full: Evaluator
    """The evaluator of all prompts."""
    choosing: Evaluator
    confirming: Evaluator
    confirming_workload: Workload
    """The prompts of ``confirming``, in its order."""

    @classmethod
    def of(cls, workload: Workload, evaluator: Evaluator) -> TuningPrompts:
        """Split the prompts of an evaluator."""
        if len(workload.prompts) < MIN_SPLIT:
            return cls(workload, evaluator, evaluator, evaluator, workload)
        is_confirming = confirms(evaluator.tasks)
        choosing, confirming = (evaluator.select(np.flatnonzero(flags)) for flags in (~is_confirming, is_confirming))
        prompts = tuple(itertools.compress(workload.prompts, is_confirming))
        return cls(workload, evaluator, choosing, confirming, replace(workload, prompts=prompts))

    def with_table(self, table: CostTable) -> TuningPrompts:
        """The same split with other prices."""
        full, choosing, confirming = (e.with_table(table) for e in (self.full, self.choosing, self.confirming))
        return replace(self, full=full, choosing=choosing, confirming=confirming)


def confirms(tasks: Sequence[str]) -> NDArray[np.bool_]:
    """Whether each prompt is a confirming one, [prompts]: every third of each task, and of the tasks with fewer
    prompts; every second where thirds are fewer than ``MIN_CONFIRMING``.
    """
    seen: Counter[str] = Counter()
    step = CONFIRMING if len(tasks) >= CONFIRMING * MIN_CONFIRMING else 2
    rare = {task for task, count in Counter(tasks).items() if count < step}
    flags = []
    for task in tasks:
        name = "" if task in rare else task
        flags.append(seen[name] % step == step - 1)
        seen[name] += 1
    return np.array(flags)


def speedup_interval(
    evaluator: Evaluator, configuration: Configuration, *, other_prompts: bool = False
) -> tuple[float, float]:
    """90 % interval of a predicted speedup on the evaluator's prompts, or on ``other_prompts`` like them."""
    speedups = speedup_draws(evaluator, configuration, other_prompts=other_prompts)
    decoding = np.random.default_rng(2).normal(0.0, DECODING_ERROR, len(speedups))
    low, high = np.quantile(speedups * np.exp(decoding), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
