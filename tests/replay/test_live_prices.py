"""Prices after real rounds, against times that are made from known ones."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded
from autotune.replay.evaluator import Evaluator
from autotune.replay.live_prices import updated_table
from tests.evaluation.sample_runs import run
from tests.sample_documents import cost_table, observed_table, random_trace

CHAIN = Configuration(tree={"policy": "chain", "depth": 3})
TREE = Configuration(tree={"policy": "eagle2", "k": 2, "depth": 3})
SLOWER_MACHINE = 1.5  # than when the table was measured: plain steps too


def runs_of(evaluator: Evaluator, verify: float, draft: float, overhead: float) -> tuple[list[Decoded], list[Decoded]]:
    """Runs of the chain whose parts take so many times as long as predicted, and of plain decoding."""
    result = evaluator.replay(CHAIN)
    parts = np.array([verify * result.verify_ms, draft * result.draft_ms, overhead * result.overhead_ms])
    prefill_ms = result.draft_prefill_ms
    runs = [
        run(
            float(SLOWER_MACHINE * (ms.sum() + prefill)),
            tokens=int(tokens) + 1,
            verify_ms=float(SLOWER_MACHINE * ms[0]),
            draft_ms=float(SLOWER_MACHINE * ms[1]),
            draft_prefill_ms=float(SLOWER_MACHINE * prefill),
        )
        for ms, prefill, tokens in zip(parts.T, prefill_ms, result.tokens, strict=True)
    ]
    plain = [
        run(float(SLOWER_MACHINE * ms), tokens=int(tokens) + 1)
        for ms, tokens in zip(evaluator.ar_ms, result.tokens, strict=True)
    ]
    return runs, plain


@pytest.mark.parametrize("factors", [(1.2, 1.2, 1.0), (1.25, 1.0, 1.0), (0.85, 0.9, 1.0)])
def test_the_updated_prediction_is_what_was_measured(factors: tuple[float, float, float]) -> None:
    evaluator = Evaluator([random_trace(0, num_prompts=8)], observed_table(0.03))
    runs, plain = runs_of(evaluator, *factors)
    measured = sum(r.decode_ms for r in plain) / sum(r.decode_ms for r in runs)
    before = evaluator.evaluate(CHAIN).speedup
    updated = evaluator.with_table(updated_table(evaluator, {"finalist": (CHAIN, runs)}, plain))
    after = updated.evaluate(CHAIN).speedup
    assert abs(after / measured - 1) < 0.3 * abs(before / measured - 1)
    assert updated.ar_ms_per_token == pytest.approx(evaluator.ar_ms_per_token, rel=0.01), "plain steps are the unit"
    moved = updated.evaluate(TREE).speedup / evaluator.evaluate(TREE).speedup
    assert (moved < 0.97) if measured < before else (moved > 1.03), "other trees have the same steps"


def test_rounds_as_predicted_change_nothing() -> None:
    evaluator = Evaluator([random_trace(0, num_prompts=8)], observed_table(0.03))
    runs, plain = runs_of(evaluator, 1.0, 1.0, 1.0)
    updated = evaluator.with_table(updated_table(evaluator, {"finalist": (CHAIN, runs)}, plain))
    for configuration in (CHAIN, TREE):
        assert updated.evaluate(configuration).speedup == pytest.approx(
            evaluator.evaluate(configuration).speedup, rel=0.01
        )


def test_an_estimated_table_stays_as_it_is() -> None:
    evaluator = Evaluator([random_trace(0, num_prompts=8)], cost_table())
    runs, plain = runs_of(evaluator, 1.2, 1.2, 1.2)
    assert updated_table(evaluator, {"finalist": (CHAIN, runs)}, plain) is evaluator.table
