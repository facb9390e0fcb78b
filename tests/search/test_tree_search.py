"""Tree search: is deterministic, resumes, and finds the best of exhaustive search."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from autotune.documents.configuration import Configuration
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.documents.search_space import SearchSpace
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.replay.draws import time_draws
from autotune.replay.evaluator import Candidate, Evaluator
from autotune.replay.replay import replay
from autotune.search import thresholds
from autotune.search.finalists import choose_finalists, confirmable
from autotune.search.thresholds import CONFIDENCE, NUM_CONFIRMED, NUM_CONFIRMED_OF_KIND
from autotune.study.storage import optuna_storage
from autotune.trees.policy import parse_policy
from autotune.trees.static import StaticPolicy
from tests.sample_documents import cost_table, observed_table, random_trace
from tests.search.small_searches import KEEPS, LARGE, SMALL, evaluator, shared_search, space, stage, variant

REPOSITORY = Path(__file__).parents[2]


def search(*args: Any, **options: Any) -> list[Candidate]:
    return stage(*args, **options).fastest


def figures(candidates: list[Candidate]) -> list[tuple[str, float]]:
    return [(candidate.configuration.key, candidate.ms_per_token) for candidate in candidates]


def ten_prompts() -> Evaluator:
    """An evaluator with five prompts of each of two tasks."""
    traces = [random_trace(int(10 * keep), visual_keep=keep, num_prompts=10) for keep in KEEPS]
    tasks = ["a"] * 5 + ["b"] * 5
    return Evaluator([replace(t, header=t.header.model_copy(update={"tasks": tasks})) for t in traces], cost_table())


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sweeps, as the traces are small."""
    monkeypatch.setattr(thresholds, "NUM_SWEPT", 32)
    monkeypatch.setattr(thresholds, "SWEEP_SIZE", 32)


def test_tpe_starts_from_the_best_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is at least as good as the best tree of the sweep."""
    begun: list[float] = []
    create = optuna.trial.create_trial
    monkeypatch.setattr(
        optuna.trial, "create_trial", lambda value, **of: begun.append(value) or create(value=value, **of)
    )
    found = evaluator()
    best = sorted(
        found.evaluate(Configuration(tree=tree, subnet=Subnet(visual_keep=keep))).ms_per_token
        for keep in KEEPS
        for tree in space(LARGE).sweep("sage", 32, 5)
    )
    candidates = search(evaluator(), LARGE, tmp_path / "l", seed=5)
    assert begun[: thresholds.NUM_KEPT] == pytest.approx(best[: thresholds.NUM_KEPT])
    assert candidates[0].ms_per_token <= best[0]


def test_only_the_fastest_over_the_first_prompts_are_replayed_over_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest 24 of a sweep of 128 trees are promoted, and contain the five best trees."""
    monkeypatch.setattr(thresholds, "NUM_SWEPT", 128)
    monkeypatch.setattr(thresholds, "SWEEP_SIZE", 128)
    trees = {"sage": LARGE["sage"]}
    monkeypatch.setattr(thresholds, "NUM_PROMOTED", 128)
    by_force = search(ten_prompts(), trees, tmp_path / "force", num_trials=1)
    monkeypatch.setattr(thresholds, "NUM_PROMOTED", 24)
    result = stage(ten_prompts(), trees, tmp_path / "race", num_trials=1)
    assert result.num_replayed == 128 * len(KEEPS) + 1
    assert figures(result.fastest)[:5] == figures(by_force)[:5]


def test_static_trees_come_from_the_dynamic_programme(tmp_path: Path) -> None:
    found = evaluator()
    of_static = {"static": {"budget": {"low": 1, "high": 6}, "depth": {"low": 1, "high": 3}}}
    candidates = search(found, of_static, tmp_path / "l", num_trials=1)
    assert len(candidates) > 6 and {c.configuration.subnet.visual_keep for c in candidates} == {*KEEPS}
    for candidate in candidates:
        policy = parse_policy(candidate.configuration.tree)
        assert policy.policy == "static" and policy.size.nodes <= 6 and policy.size.depth <= 3


@pytest.mark.parametrize(("budget", "is_held"), [(25, True), (24, False)])
def test_static_trees_have_the_published_one_of_their_sizes(budget: int, is_held: bool) -> None:
    """EAGLE-1's tree has 25 nodes on 5 levels: 4, 8, 8, 3 and 2."""
    found = evaluator()
    published = parse_policy(PUBLISHED_DEFAULTS["sd-tree"].tree)
    assert (published.size.nodes, published.size.depth) == (25, 5)
    assert isinstance(published, StaticPolicy) and Counter(map(len, published.paths)) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    trees = found.template_trees(next(iter(found.traces)), {"budget": [6, budget], "depth": [5]})
    assert (published.model_dump(mode="json") in trees) == is_held and len(trees) > 1


def test_small_space_is_searched_exhaustively(tmp_path: Path) -> None:
    """The order of all candidates equals that of single replays."""
    found = evaluator()
    result = stage(found, SMALL, tmp_path / "ledger", num_trials=3)
    candidates = result.fastest
    everything = [{"policy": "chain", "depth": depth} for depth in range(1, 5)]
    everything += [
        {"policy": "sage", "k": k, "d_min": low, "d_max": high}
        for k, low, high in itertools.product((2, 4), (1, 2), (3, 4))
    ]
    by_force = sorted(
        (
            replay(found.traces[variant(keep)], parse_policy(tree), found.prices[variant(keep)]).ms_per_token,
            keep,
            str(tree),
        )
        for keep in KEEPS
        for tree in everything
    )
    assert len(candidates) == len(by_force) == result.num_replayed == 24
    assert [c.ms_per_token for c in candidates] == pytest.approx([ms for ms, _, _ in by_force])
    assert (candidates[0].configuration.subnet.visual_keep, str(candidates[0].configuration.tree)) == by_force[0][1:]


def test_search_is_deterministic(tmp_path: Path) -> None:
    """Equal seeds and documents give equal results; another seed samples other trees."""
    runs = [
        search(evaluator(), LARGE, tmp_path / name, num_trials=55, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert figures(runs[0]) == figures(runs[1]) != figures(runs[2])
    for candidates in runs:
        assert len({c.configuration.tree["policy"] for c in candidates}) == 2
        assert [c.ms_per_token for c in candidates] == sorted(c.ms_per_token for c in candidates)


def test_search_resumes_from_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 50 trials, a search with 80 trials draws 30."""
    drawn: list[dict[str, Any]] = []
    suggest = SearchSpace.suggest

    def counted(self: SearchSpace, trial: Any, policies: list[str]) -> dict[str, Any]:
        tree = suggest(self, trial, policies)
        drawn.extend([tree] if isinstance(trial, optuna.Trial) else ())  # the others are of the sweeps
        return tree

    monkeypatch.setattr(SearchSpace, "suggest", counted)
    first = search(evaluator(), LARGE, tmp_path / "l", num_trials=50)
    assert len(drawn) == 50
    second = search(evaluator(), LARGE, tmp_path / "l", num_trials=80)
    assert len(drawn) == 80 and second[0].ms_per_token <= first[0].ms_per_token
    assert drawn[50:] != drawn[:30], "a resumed search draws other trees"
    again = search(evaluator(), LARGE, tmp_path / "l", num_trials=80)
    assert len(drawn) == 80 and figures(again) == figures(second), "a finished search draws nothing"
    search(evaluator(), LARGE, tmp_path / "l", num_trials=5, documents="other traces")
    assert len(drawn) == 85, "other documents have other records"


WORKER = """
import sys
from tests.search.small_searches import shared_search
print("ready", flush=True)
print(shared_search(sys.argv[1]))
"""


def test_workers_on_postgresql_have_the_result_of_one(postgresql: str, tmp_path: Path) -> None:
    """This process and another share a database: both end with the same winner and the same number of replays."""
    command = [sys.executable, "-c", WORKER, postgresql]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        found = shared_search(postgresql)
        printed, _ = other.communicate(timeout=900)
    assert other.returncode == 0
    assert found == ast.literal_eval(printed) == shared_search(tmp_path / "alone")


def test_trials_are_published_to_optuna(tmp_path: Path) -> None:
    """Each trial is published once, also by a repeated search."""
    for _ in range(2):
        search(evaluator(), LARGE, tmp_path / "ledger", num_trials=60)
    assert (tmp_path / "ledger.optuna").exists()
    (summary,) = optuna.get_all_study_summaries(optuna_storage(tmp_path / "ledger"))
    assert summary.n_trials == 60 and summary.study_name.startswith("trees-")


def test_no_unit_is_started_after_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tree of space x was found within the budget; raise it"):
        search(evaluator(), LARGE, tmp_path / "l", deadline=time.monotonic() - 1)


def test_finalists_are_distinct(tmp_path: Path) -> None:
    """One of each subnet and policy, at most two of a policy, and of more than two none that is slower than the first
    in nine of ten draws.
    """
    uncertain = Evaluator(evaluator().traces.values(), observed_table(error=0.5))
    candidates = search(uncertain, LARGE, tmp_path / "l")
    finalists = choose_finalists(candidates, uncertain, 9)
    kinds = [(c.configuration.tree["policy"], c.configuration.subnet.visual_keep) for c in finalists]
    assert len(set(kinds)) == len(kinds) > 1 and set(kinds) <= {(policy, keep) for policy in LARGE for keep in KEEPS}
    ms = time_draws(uncertain, [c.configuration for c in finalists])
    assert all((row <= ms[0]).mean() >= 1 - CONFIDENCE for row in ms)
    all_ms = time_draws(uncertain, [c.configuration for c in candidates])
    shares = np.bincount(all_ms.argmin(0), minlength=len(candidates))
    assert finalists[0].key == candidates[int(shares.argmax())].key
    assert len(choose_finalists(candidates, uncertain, 2)) == 2
    certain = evaluator()
    slow = certain.evaluate(Configuration(tree={"policy": "chain", "depth": 4}))
    fast = certain.evaluate(candidates[0].configuration)
    assert slow.ms_per_token > 1.2 * fast.ms_per_token
    slower = certain.evaluate(Configuration(tree={"policy": "chain", "depth": 4}, subnet=Subnet(visual_keep=0.5)))
    chosen = choose_finalists([fast, slow, slower], certain, 9)
    assert chosen[0] == fast and len(chosen) == 2, "two run in any case"


def test_the_fastest_of_every_draft_and_policy_are_confirmed() -> None:
    """Also where the fastest overall are all of one policy."""
    known = evaluator().evaluate(Configuration(tree={"policy": "chain", "depth": 2}))

    def candidate(policy: str, number: int) -> Candidate:
        tree = {"policy": policy, "depth": 1 + number}
        return known.model_copy(update={"configuration": known.configuration.model_copy(update={"tree": tree})})

    fastest = [candidate("chain", n) for n in range(200)] + [candidate("eagle2", n) for n in range(20)]
    chosen = confirmable(fastest)
    assert chosen == [*fastest[:NUM_CONFIRMED], *fastest[200 : 200 + NUM_CONFIRMED_OF_KIND]]
