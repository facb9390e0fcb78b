"""Evaluators over random traces, and searches over them. Loads no torch, so that a process that shares a search starts
quickly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from autotune.documents.search_space import SearchSpace
from autotune.documents.subnet import Subnet
from autotune.replay.evaluator import Evaluator
from autotune.search import thresholds
from autotune.search.tree_search import TreeSearchResult, search_trees
from autotune.study.ledger import Ledger
from tests.sample_documents import DRAFT, cost_table, random_trace

KEEPS = (1.0, 0.5)
# The random traces have four levels and four children per node; all trees here fit.
SMALL = {
    "chain": {"depth": {"low": 1, "high": 4}},
    "sage": {"k": {"choices": [2, 4]}, "d_min": {"choices": [1, 2]}, "d_max": {"choices": [3, 4]}},
}
LARGE = {
    "chain": {"depth": {"low": 1, "high": 4}},
    "sage": {
        "d_min": {"low": 1, "high": 4},
        "d_max": {"low": 1, "high": 4},
        "w_min": {"low": 1, "high": 4},
        "w_max": {"low": 1, "high": 4},
        "k": {"low": 2, "high": 4},
        "n_max": {"low": 2, "high": 64, "log": True},
        "upper": {"low": 2.0, "high": 6.0},
    },
}


def evaluator(jobs: int | None = None) -> Evaluator:
    traces = [random_trace(int(10 * keep), visual_keep=keep) for keep in KEEPS]
    return Evaluator(traces, cost_table(), jobs=jobs)


def variant(keep: float) -> tuple[str, Subnet]:
    return DRAFT.id, Subnet(visual_keep=keep)


def space(trees: dict[str, Any]) -> SearchSpace:
    return SearchSpace.model_validate({"name": "x", "visual_keep": list(KEEPS), "trees": trees})


def stage(found: Evaluator, trees: dict[str, Any], storage: Path | str, **options: Any) -> TreeSearchResult:
    settings = {"num_trials": 30, "documents": "x", **options}
    return search_trees(found, space(trees), Ledger(storage), **settings)


def shared_search(storage: Path | str) -> tuple[int, str, float]:
    """Number of replays, and the winner, of a search that other processes may share through ``storage``."""
    with mock.patch.object(thresholds, "NUM_SWEPT", 64), mock.patch.object(thresholds, "SWEEP_SIZE", 32):
        found = stage(evaluator(jobs=1), LARGE, storage, num_trials=60)
    return found.num_replayed, found.fastest[0].key, found.fastest[0].ms_per_token
