"""The split of the tuning prompts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from autotune.documents.configuration import Configuration
from autotune.prediction.evaluator import Evaluator
from autotune.search.tuning_prompts import TuningPrompts, confirms
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.sample_documents import cost_table, random_trace

CHAIN = Configuration(tree={"policy": "chain", "depth": 3})


def workload(count: int) -> Workload:
    return Workload("x", "tune", tuple(WorkloadPrompt(f"{n}", Prompt(prompt=f"{n}"), ()) for n in range(count)))


def test_a_third_of_full_task_confirms() -> None:
    tasks = ["read", "add"] * 9 + ["rare", "rarer", "rarest"]
    flags = confirms(tasks)
    assert Counter(np.array(tasks)[flags].tolist()) == {"read": 3, "add": 3, "rarest": 1}


def test_evaluators_of_both_parts_add_up_to_the_full_one() -> None:
    """Every prompt is in one of them, and confirming prompts keep their order."""
    full = Evaluator([random_trace(0, num_prompts=15)], cost_table())
    prompts = TuningPrompts.of(workload(15), full)
    flags = confirms(full.tasks)
    assert [p.name for p in prompts.confirming_workload.prompts] == [str(n) for n in np.flatnonzero(flags)]
    full_ms = full.prompt_ms([CHAIN])[0]
    np.testing.assert_array_equal(prompts.choosing.prompt_ms([CHAIN])[0], full_ms[~flags])
    np.testing.assert_array_equal(prompts.confirming.prompt_ms([CHAIN])[0], full_ms[flags])
    assert prompts.confirming.ar_ms.sum() + prompts.choosing.ar_ms.sum() == pytest.approx(full.ar_ms.sum())


def test_few_prompts_are_not_split() -> None:
    full = Evaluator([random_trace(0, num_prompts=4)], cost_table())
    prompts = TuningPrompts.of(workload(4), full)
    assert prompts.choosing is prompts.confirming is full
    assert prompts.confirming_workload is prompts.workload
