"""The split of the tuning prompts: trees are chosen on some of them, and the choice is confirmed on the others.

The fastest of thousands of configurations on some prompts is partly the fastest by chance (the winner's curse). Prompts that
did not take part in the choice predict its speed without this bias.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.search.evaluator import Evaluator
from autotune.workloads.workload import Workload

CONFIRMING = 3  # every third prompt of a task confirms
MIN_SPLIT = 12  # prompts; fewer both choose and confirm


@dataclass(frozen=True)
class TuningPrompts:
    """The tuning prompts, and evaluators of all of them and of both parts."""

    workload: Workload
    every: Evaluator
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
        chosen = np.flatnonzero(is_confirming)
        prompts = tuple(workload.prompts[number] for number in chosen)
        return cls(
            workload,
            evaluator,
            evaluator.select(np.flatnonzero(~is_confirming)),
            evaluator.select(chosen),
            Workload(workload.name, workload.split, prompts),
        )


def confirms(tasks: Sequence[str]) -> NDArray[np.bool_]:
    """Whether each prompt is a confirming one, [prompts]: every third of each task, and of the tasks with fewer prompts."""
    seen: Counter[str] = Counter()
    rare = {task for task, count in Counter(tasks).items() if count < CONFIRMING}
    flags = []
    for task in tasks:
        name = "" if task in rare else task
        flags.append(seen[name] % CONFIRMING == CONFIRMING - 1)
        seen[name] += 1
    return np.array(flags)
