"""A study of the tiny pair whose trees are searched, and searches without command lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.console import Console
from autotune.documents.search_space import SearchSpace
from autotune.replay.evaluator import Evaluator
from autotune.runtime.model_pool import ModelPool, variants_of
from autotune.search.plan import Plan, Rates
from autotune.search.thresholds import KEPT_PROMPTS
from autotune.search.traces import record
from autotune.search.tree_search import TreeSearchResult, tune_trees
from autotune.search.tuning import StageClock, Tuning
from autotune.search.tuning_prompts import TuningPrompts
from autotune.study.search_settings import SearchSettings
from autotune.study.spaces import bounds_of
from autotune.workloads.workload import Workload, load_workload
from tests.evaluation.conftest import evaluate
from tests.sample_documents import cost_table, write_image, write_workload
from tests.tiny_models import Pair

__all__ = ["evaluate"]
SPACE = {
    "name": "x",
    "visual_keep": [1.0, 0.5],
    "trees": {"chain": {"depth": {"low": 1, "high": 4}}, "eagle2": {"k": {"choices": [2]}, "depth": {"choices": [3]}}},
}
PLAN = Plan(
    seconds=3600,
    rates=Rates(prefill_s=0.01, step_s=0.001),
    num_tune_prompts=16,
    max_new_tokens=None,
    full_s=1.0,
    kept_s={},
    kept_prompts=KEPT_PROMPTS[0],
    screening_share=0.1,
)


def tuning_of(
    pool: ModelPool,
    tune: Workload,
    folder: Path,
    space: dict[str, Any],
    *,
    held_out: Workload | None = None,
    **settings: Any,
) -> Tuning:
    """A search with loaded models, whose study is ``folder``."""
    target, drafts = pool.target_reference.id, tuple(pool.references)
    given = SearchSettings(target=target, drafts=drafts, study=f"{folder}/", **{"jobs": 1, **settings})
    whole = SearchSpace.model_validate(space)
    return Tuning(
        settings=given,
        pool=pool,
        space=whole,
        bounds=bounds_of(whole),
        variants=variants_of(pool, whole),
        tune=tune,
        held_out=held_out or tune,
        device="cpu",
        console=Console(),
        clock=StageClock(given.budget_s),
    )


@dataclass
class Searched:
    """A search before its finalists run."""

    tuning: Tuning
    prompts: TuningPrompts
    trees: TreeSearchResult


@pytest.fixture(scope="session")
def searched(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """After a tree search over real traces of the tiny pair."""
    folder = tmp_path_factory.mktemp("study")
    known: dict[str, Any] = {"images": [write_image(folder / "0.png", 0)], "task": "read", "max_new_tokens": 24}
    lines = [
        {**known, "prompt": f"Read {number} rows to {split}.", "split": split, "temperature": float(number % 2)}
        for split, count in (("tune", 16), ("evaluate", 4))
        for number in range(count)
    ]
    path = str(write_workload(folder, lines))
    tune, held_out = load_workload(path, "tune"), load_workload(path, "evaluate")
    pool = ModelPool(str(pair.target_folder), [str(pair.draft_folder)], "cpu")
    tuning = tuning_of(pool, tune, folder, SPACE, held_out=held_out, budget_s=3600, num_trials=1)
    table = cost_table()
    drafts = [table.drafts[0].model_copy(update={"draft": draft}) for draft in pool.references.values()]
    table = table.model_copy(update={"drafts": drafts, "target": pool.target_reference})
    prompts = TuningPrompts.of(tune, Evaluator(record(tuning, PLAN, tuning.variants), table))
    return Searched(tuning, prompts, tune_trees(tuning, prompts))
