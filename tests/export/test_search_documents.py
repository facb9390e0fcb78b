"""Engine replay against the evaluator, and the chains of its space."""

from __future__ import annotations

import pytest

from autotune.documents.configuration import Configuration
from autotune.export.search_documents import priced_chains
from autotune.prediction.evaluator import Evaluator
from tests.export.studies import trace_of
from tests.sample_documents import cost_table, surface

LENGTHS = (16, 256, 400)


def test_chain_costs_an_engine_the_same_as_the_runtime() -> None:
    """Every round of a chain drafts and verifies the same number of tokens."""
    trace, table = trace_of(), cost_table()
    for depth in (1, 2, 4):
        evaluated = Evaluator([trace], table).evaluate(Configuration(tree={"policy": "chain", "depth": depth}))
        found = priced_chains(trace, table)[depth]
        assert found.ms_per_token == pytest.approx(evaluated.ms_per_token, rel=1e-12), depth
        assert found.tokens_per_round == evaluated.tokens_per_round, depth
        assert found.speedup == pytest.approx(evaluated.speedup, rel=1e-12), depth


def test_space_is_limited_by_trace_and_table() -> None:
    assert list(priced_chains(trace_of(), cost_table())) == [1, 2, 3, 4]
    sizes = {"tokens": (1, 4), "kv_lengths": LENGTHS}
    small = cost_table(verify=surface(lambda n, m: 1.0 + 0.02 * n, **sizes))
    assert list(priced_chains(trace_of(), small)) == [1, 2, 3]
