"""The split of the tuning prompts, and intervals of predictions on them, against what they should cover."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from autotune.cost.joint_fit import refitted
from autotune.cost.surface import Observation, Surface
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.replay.draws import speedup_draws, time_draws
from autotune.replay.evaluator import Evaluator
from autotune.search.thresholds import DECODING_ERROR
from autotune.search.tuning_prompts import TuningPrompts, confirms, speedup_interval
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.sample_documents import cost_table, observed_table, random_trace

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
    prompts, few = TuningPrompts.of(workload(15), full), TuningPrompts.of(workload(4), full)
    assert few.choosing is few.confirming is full and few.confirming_workload is few.workload
    flags = confirms(full.tasks)
    assert [p.name for p in prompts.confirming_workload.prompts] == [str(n) for n in np.flatnonzero(flags)]
    full_ms = full.replay(CHAIN).decode_ms
    np.testing.assert_array_equal(prompts.choosing.replay(CHAIN).decode_ms, full_ms[~flags])
    np.testing.assert_array_equal(prompts.confirming.replay(CHAIN).decode_ms, full_ms[flags])
    assert prompts.confirming.ar_ms.sum() + prompts.choosing.ar_ms.sum() == pytest.approx(full.ar_ms.sum())


def test_interval_without_errors_is_that_of_decoding() -> None:
    """Decoding differs from single steps even where these are known exactly."""
    evaluator = Evaluator([random_trace(0)], cost_table())
    speedup = evaluator.evaluate(CHAIN).speedup
    half_width = float(np.exp(1.645 * DECODING_ERROR))
    assert speedup_interval(evaluator, CHAIN) == pytest.approx((speedup / half_width, speedup * half_width), rel=0.02)


def test_draws_cover_the_truth() -> None:
    """Tables whose prices were observed with errors of 10 %: the true speedup lies in nine of ten intervals of the
    draws.
    """
    truth = Evaluator([random_trace(0)], cost_table()).evaluate(CHAIN).speedup
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(40):
        draws = speedup_draws(Evaluator([random_trace(0)], disturbed_table(rng, 0.1)), CHAIN)
        low, high = np.quantile(draws, [0.05, 0.95])
        inside += low <= truth <= high
    assert inside / 40 >= 0.75


def disturbed_table(rng: np.random.Generator, error: float) -> CostTable:
    """The sample table as a measurement with independent errors of every size finds it."""

    def disturbed(of: Surface) -> Surface:
        points = [
            point.model_copy(
                update={"observed": Observation(ms=point.latency_ms * float(np.exp(rng.normal(0, error))), error=error)}
            )
            for point in of.points
        ]
        return of.model_copy(update={"points": points})

    table = cost_table()
    (costs,) = table.drafts
    drafts = [
        costs.model_copy(update={name: disturbed(getattr(costs, name)) for name in ("draft_first", "draft_level")})
    ]
    parts = {"decode": disturbed(table.decode), "verify": disturbed(table.verify), "drafts": drafts}
    return refitted(table.model_copy(update=parts))


def test_other_prompts_widen_the_interval() -> None:
    evaluator = Evaluator([random_trace(0)], observed_table(0.1))
    low, high = speedup_interval(evaluator, CHAIN)
    wide_low, wide_high = speedup_interval(evaluator, CHAIN, other_prompts=True)
    assert wide_low < low < high < wide_high


def test_shared_errors_cancel_in_a_comparison() -> None:
    """The prices of two similar trees err together, and so do the prompts: their ratio is known better than each."""
    evaluator = Evaluator([random_trace(0)], observed_table(0.3))
    longer = Configuration(tree={"policy": "chain", "depth": 4})
    chain, tree = np.log(time_draws(evaluator, [CHAIN, longer]))
    assert (chain - tree).std() < 0.5 * min(chain.std(), tree.std())
    assert (chain - chain).std() == 0


def test_draws_add_up_to_the_replayed_time() -> None:
    """Without errors of prices, every draw of the same prompts is the predicted time."""
    evaluator = Evaluator([random_trace(0, num_prompts=5)], cost_table())
    for configuration in (CHAIN, TREE):
        result = evaluator.replay(configuration)
        assert result.step_ms.sum() == pytest.approx((result.draft_ms + result.verify_ms).sum())
        drawn = time_draws(evaluator, [configuration], other_prompts=False)
        np.testing.assert_allclose(drawn, result.decode_ms.sum())
