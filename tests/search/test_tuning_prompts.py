"""The split of the tuning prompts, and intervals of predictions on them, against what they should cover."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from autotune.cost.surface import MAD_TO_SD
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.prediction.evaluator import Evaluator
from autotune.search.thresholds import DECODING_ERROR
from autotune.search.tuning_prompts import TuningPrompts, confirms, ratio_interval, speedup_interval
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.sample_documents import cost_table, random_trace, surface

CHAIN = Configuration(tree={"policy": "chain", "depth": 3})
TREE = Configuration(tree={"policy": "eagle2", "k": 2, "depth": 3})


def workload(count: int) -> Workload:
    return Workload("x", "tune", tuple(WorkloadPrompt(f"{n}", Prompt(prompt=f"{n}"), ()) for n in range(count)))


@pytest.mark.parametrize(
    ("num_pairs", "confirming"), [(18, {"read": 6, "add": 6, "rarest": 1}), (9, {"read": 4, "add": 4, "rarer": 1})]
)
def test_a_third_of_full_task_confirms_and_half_of_few_prompts(num_pairs: int, confirming: dict[str, int]) -> None:
    tasks = ["read", "add"] * num_pairs + ["rare", "rarer", "rarest"]
    assert Counter(np.array(tasks)[confirms(tasks)].tolist()) == confirming


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


def with_errors(**errors: float) -> CostTable:
    """The sample table with a held-out error of parts: ``decode``, ``verify``, ``draft_level``."""
    table = cost_table()
    costs = table.drafts[0]
    if "draft_level" in errors:
        level = costs.draft_level.model_copy(update={"errors": {"linear": errors["draft_level"]}})
        table = table.model_copy(update={"drafts": [costs.model_copy(update={"draft_level": level})]})
    parts = {
        name: getattr(table, name).model_copy(update={"errors": {"linear": errors[name]}})
        for name in ("decode", "verify")
        if name in errors
    }
    return table.model_copy(update=parts)


def test_interval_without_errors_is_that_of_decoding() -> None:
    """Decoding differs from single steps even where these are known exactly."""
    evaluator = Evaluator([random_trace(0)], cost_table())
    speedup = evaluator.evaluate(CHAIN).speedup
    half_width = float(np.exp(1.645 * DECODING_ERROR))
    assert speedup_interval(evaluator, CHAIN) == pytest.approx((speedup / half_width, speedup * half_width), rel=1e-3)


def test_interval_contains_the_predictions_of_disturbed_tables() -> None:
    """Tables whose verification and plain steps are off by random factors, and decoding too: 90 % lie inside."""
    evaluator = Evaluator([random_trace(0)], with_errors(verify=0.1, decode=0.05))
    low, high = speedup_interval(evaluator, CHAIN)
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(60):
        verify, decode = np.exp(rng.normal(0, MAD_TO_SD * np.array([0.1, 0.05])))
        table = cost_table(
            decode=surface(lambda n, m, f=decode: f * (1.0 + 0.001 * m), tokens=(1,)),
            verify=surface(lambda n, m, f=verify: f * (1.0 + 0.02 * n + 0.001 * m)),
        )
        speedup = Evaluator([random_trace(0)], table).evaluate(CHAIN).speedup * np.exp(rng.normal(0, DECODING_ERROR))
        inside += low <= speedup <= high
    assert 0.8 <= inside / 60 <= 0.97


def test_other_prompts_widen_the_interval() -> None:
    evaluator = Evaluator([random_trace(0)], with_errors(verify=0.1))
    low, high = speedup_interval(evaluator, CHAIN)
    wide_low, wide_high = speedup_interval(evaluator, CHAIN, other_prompts=True)
    assert wide_low < low < high < wide_high


def test_ratio_of_a_configuration_to_itself_is_certain() -> None:
    """Whatever the errors of the table."""
    evaluator = Evaluator([random_trace(0)], with_errors(verify=0.3, draft_level=0.3))
    assert ratio_interval(evaluator, CHAIN, CHAIN) == pytest.approx((1.0, 1.0))


def test_shared_errors_cancel_in_a_ratio() -> None:
    """An error of the plain step, which neither configuration takes, and of a part with nearly the same share in both."""
    evaluator = Evaluator([random_trace(0)], cost_table())
    narrow = ratio_interval(evaluator, TREE, CHAIN)
    assert ratio_interval(Evaluator([random_trace(0)], with_errors(decode=0.5)), TREE, CHAIN) == pytest.approx(narrow)
    uncertain = Evaluator([random_trace(0)], with_errors(verify=0.1))
    low, high = ratio_interval(uncertain, TREE, CHAIN)
    speedup_low, speedup_high = speedup_interval(uncertain, TREE)
    assert np.log(high / low) - np.log(narrow[1] / narrow[0]) < 0.5 * np.log(speedup_high / speedup_low)
