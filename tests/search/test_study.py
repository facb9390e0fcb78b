"""The search over trees: without torch, repeatable, resumable, and no worse than trying everything."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.acceptance.replay import plain_decode_ms, replay
from autotune.cost.profiler import kv_lengths_for
from autotune.errors import UserError
from autotune.search import study as study_module
from autotune.search.space import PUBLISHED_DEFAULTS, Configuration, SearchSpace
from autotune.search.study import Candidate, Evaluator, choose_finalists, search_trees
from autotune.trees.policy import parse_policy
from tests.documents import DRAFT, cost_table, random_trace, surface

REPOSITORY = Path(__file__).parents[2]
KEEPS = (1.0, 0.5)
# Everything here fits what the random traces hold: four levels, four children.
SMALL = {"chain": {"depth": {"low": 1, "high": 4}}, "sage": {"k": {"choices": [2, 4]}, "d_min": {"choices": [1, 2]}, "d_max": {"choices": [3, 4]}}}  # fmt: skip
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


def space(trees: dict[str, Any]) -> SearchSpace:
    return SearchSpace.model_validate({"name": "x", "visual_keep": {"choices": list(KEEPS)}, "trees": trees})


def evaluator() -> Evaluator:
    return Evaluator([random_trace(int(10 * keep), visual_keep=keep) for keep in KEEPS], cost_table(), DRAFT)


@pytest.fixture(autouse=True)
def defaults_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published defaults reach deeper than the random traces."""
    small = {"chain": Configuration(tree={"policy": "chain", "depth": 3}, visual_keep=1.0)}
    monkeypatch.setattr(study_module, "PUBLISHED_DEFAULTS", small)


def figures(candidates: list[Candidate]) -> list[tuple[str, float]]:
    return [(candidate.configuration.key, candidate.ms_per_token) for candidate in candidates]


# ------------------------------------------------------------------------------------------------------------ evaluator


def test_a_candidate_is_its_replay() -> None:
    found = evaluator()
    configuration = Configuration(tree={"policy": "sage", "k": 4, "d_max": 4}, visual_keep=0.5)
    candidate = found.evaluate(configuration)
    replayed = replay(found.traces[0.5], parse_policy(configuration.tree), found.prices)
    assert candidate.ms_per_token == replayed.decode_ms.sum() / replayed.tokens.sum()
    assert candidate.tokens_per_round == replayed.tokens.sum() / replayed.rounds.sum()
    assert candidate.nodes_per_round == replayed.verified_nodes.sum() / replayed.rounds.sum()
    plain = plain_decode_ms(found.traces[1.0], found.prices).sum() / found.traces[1.0].num_tokens
    assert found.ar_ms_per_token == pytest.approx(plain)
    assert candidate.speedup == pytest.approx(plain / candidate.ms_per_token)


def test_a_configuration_is_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(study_module, "replay", lambda *args: calls.append(args) or replay(*args))
    found = evaluator()
    configuration = Configuration(tree={"policy": "chain", "depth": 2}, visual_keep=1.0)
    assert found.evaluate(configuration) is found.evaluate(configuration)
    assert len(calls) == found.num_evaluated == 1


def test_a_visual_keep_without_a_trace_is_refused() -> None:
    with pytest.raises(UserError, match=r"no trace has visual keep 0\.3; there are 0\.5, 1; record it, or narrow"):
        evaluator().evaluate(Configuration(tree={"policy": "chain"}, visual_keep=0.3))


def test_short_prompts_are_within_their_own_table() -> None:
    """The table that ``autotune search`` measures for a workload prices every tree along it."""
    lengths, _ = kv_lengths_for(20, 60)
    flat = surface(lambda n, m: 1.0, kv_lengths=lengths)
    table = cost_table(decode=surface(lambda n, m: 1.0, tokens=(1,), kv_lengths=lengths), verify=flat)
    costs = table.drafts[0].model_copy(update={"propose": flat})
    Evaluator([random_trace(0)], table.model_copy(update={"drafts": [costs]}), DRAFT)


def test_trees_larger_than_the_table_are_refused() -> None:
    found = evaluator()
    assert found.prices.verify_ms.shape[0] - 1 == 65
    with pytest.raises(UserError, match="65"):
        found.evaluate(Configuration(tree={"policy": "sage", "k": 4, "d_max": 4, "n_max": 128}, visual_keep=1.0))


def test_ties_go_to_the_smaller_tree() -> None:
    found = evaluator()
    same = [
        Candidate(Configuration(tree={"policy": "chain", "depth": d}, visual_keep=1.0), str(d), 1.0, 2.0, float(d), 1.0)
        for d in (4, 2, 3)
    ]
    found._seen = {candidate.key: candidate for candidate in same}
    assert [candidate.nodes_per_round for candidate in found.candidates] == [2.0, 3.0, 4.0]


# --------------------------------------------------------------------------------------------------------------- search


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traces here are tiny; so is what their space is swept with."""
    monkeypatch.setattr(study_module, "NUM_SWEPT", 32)


def test_many_at_once_are_what_each_is_alone() -> None:
    """On all cores, over both visual keeps, every policy."""
    trees = [
        {"policy": "chain", "depth": 2},
        {"policy": "sage", "k": 4, "d_max": 4},
        {"policy": "eagle2", "k": 2, "depth": 3, "budget": 4},
        {"policy": "wetap", "top_k": 3, "length": 4, "w_min": 2, "w_max": 4, "budget": 6},
        {"policy": "static", "paths": [[0], [1], [0, 0], [0, 1]]},
    ]
    wanted = [Configuration(tree=tree, visual_keep=keep) for tree in trees for keep in KEEPS] * 2
    together, alone = evaluator(), evaluator()
    together.evaluate_many(wanted)
    assert together.num_evaluated == len(trees) * len(KEEPS)
    for one in wanted:
        assert together.evaluate(one) == alone.evaluate(one)
    assert together.best == alone.best == together.candidates[0]


def test_tpe_begins_with_the_best_of_an_even_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first trials are the sweep's best; it may find better ones, and never ends with less."""
    drawn: list[Configuration] = []
    suggest = SearchSpace.suggest
    monkeypatch.setattr(SearchSpace, "suggest", lambda self, *a: (drawn.append(suggest(self, *a)), drawn[-1])[1])
    found = evaluator()
    swept = [c for policy in LARGE if policy != "chain" for c, _ in space(LARGE).sweep(policy, 32, 5)]
    best = sorted(found.evaluate(configuration).ms_per_token for configuration in swept)
    candidates = search_trees(evaluator(), space(LARGE), num_trials=30, storage=tmp_path / "j", documents="x", seed=5)
    first = [found.evaluate(c).ms_per_token for c in drawn[: study_module.NUM_SEEDS]]
    assert first == pytest.approx(best[: study_module.NUM_SEEDS])
    assert candidates[0].ms_per_token <= best[0]


def test_static_trees_come_from_the_dynamic_programme(tmp_path: Path) -> None:
    found = evaluator()
    of_static = space({"static": {"budget": {"low": 1, "high": 6}, "depth": {"low": 1, "high": 3}}})
    candidates = search_trees(found, of_static, num_trials=1, storage=tmp_path / "j", documents="x")
    static = [c for c in candidates if c.configuration.tree["policy"] == "static"]
    assert len(static) == found.num_evaluated - len(candidates) + len(static) > 6
    assert {c.configuration.visual_keep for c in static} == {*KEEPS}
    for candidate in static:
        policy = parse_policy(candidate.configuration.tree)
        assert policy.max_nodes <= 6 and policy.max_depth <= 3


def test_a_round_s_price_adds_up_to_what_its_rounds_cost() -> None:
    """In plain steps: rounds, draft forwards and nodes by the price are the replayed time, but for the draft's prefill."""
    found = evaluator()
    for tree in ({"policy": "chain", "depth": 3}, {"policy": "sage", "k": 4, "d_max": 4}):
        wanted = Configuration(tree=tree, visual_keep=1.0)
        replayed, price = found.replay(wanted), found.round_price(wanted)
        steps = price.round_steps * replayed.rounds.sum() + price.level_steps * replayed.draft_forwards.sum()
        steps += price.node_steps * replayed.verified_nodes.sum()
        expected = (replayed.decode_ms - replayed.draft_prefill_ms).sum() / found.ar_ms_per_token
        assert steps == pytest.approx(expected)
        guarded = found.guarded(found.evaluate(wanted))
        assert guarded.configuration.fallback == price and guarded.key != found.evaluate(wanted).key


def test_a_tiny_space_is_searched_whole(tmp_path: Path) -> None:
    """The same best, and the same order, as trying everything."""
    found = evaluator()
    candidates = search_trees(found, space(SMALL), num_trials=3, storage=tmp_path / "journal", documents="x")
    everything = [{"policy": "chain", "depth": depth} for depth in range(1, 5)]
    everything += [
        {"policy": "sage", "k": k, "d_min": low, "d_max": high}
        for k, low, high in itertools.product((2, 4), (1, 2), (3, 4))
    ]
    prices = found.prices
    by_force = sorted(
        (replay(found.traces[keep], parse_policy(tree), prices).ms_per_token, keep, str(tree))
        for keep in KEEPS
        for tree in everything
    )
    assert len(candidates) == len(by_force) == 24
    assert [c.ms_per_token for c in candidates] == pytest.approx([ms for ms, _, _ in by_force])
    assert (candidates[0].configuration.visual_keep, str(candidates[0].configuration.tree)) == by_force[0][1:]
    assert not (tmp_path / "journal").exists(), "nothing was sampled, so there is nothing to go on with"


def test_sampling_is_no_worse_than_the_defaults_and_repeatable(tmp_path: Path) -> None:
    """The same seed and documents find the same winner; another seed looks elsewhere."""
    runs = [
        search_trees(evaluator(), space(LARGE), num_trials=70, storage=tmp_path / name, documents="x", seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert figures(runs[0]) == figures(runs[1]) != figures(runs[2])
    default = evaluator().evaluate(study_module.PUBLISHED_DEFAULTS["chain"])
    for candidates in runs:
        assert candidates[0].ms_per_token <= default.ms_per_token
        assert default.configuration.key in {c.configuration.key for c in candidates}
        assert len({c.configuration.tree["policy"] for c in candidates}) == 2
        assert [c.ms_per_token for c in candidates] == sorted(c.ms_per_token for c in candidates)


@pytest.mark.parametrize("kind", ["journal", "database"])
def test_a_search_goes_on_where_it_stood(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 trials, then 40: the first 20 are replayed from the study, 20 are drawn anew."""
    storage: Any = tmp_path / "journal" if kind == "journal" else f"sqlite:///{tmp_path}/study.db"
    drawn: list[Configuration] = []
    suggest = SearchSpace.suggest

    def counting(self: SearchSpace, *args: Any) -> Configuration:
        drawn.append(suggest(self, *args))
        return drawn[-1]

    monkeypatch.setattr(SearchSpace, "suggest", counting)
    search_trees(evaluator(), space(LARGE), num_trials=20, storage=storage, documents="x")
    first = [configuration.key for configuration in drawn]
    assert len(first) == 20
    candidates = search_trees(evaluator(), space(LARGE), num_trials=40, storage=storage, documents="x")
    assert len(drawn) == 40
    assert {*first} <= {c.configuration.key for c in candidates}
    assert [c.key for c in drawn[20:]] != first, "a resumed sampler does not draw the same numbers again"
    search_trees(evaluator(), space(LARGE), num_trials=40, storage=storage, documents="x")
    assert len(drawn) == 40, "a finished search draws nothing"
    search_trees(evaluator(), space(LARGE), num_trials=5, storage=storage, documents="other traces")
    assert len(drawn) == 45, "other documents are another study"


def test_past_the_deadline_nothing_is_sampled(tmp_path: Path) -> None:
    """What is enumerated, and the defaults, are evaluated all the same."""
    candidates = search_trees(
        evaluator(), space(LARGE), num_trials=50, storage=tmp_path / "j", documents="x", deadline=time.monotonic() - 1
    )
    assert {c.configuration.tree["policy"] for c in candidates} == {"chain"} and len(candidates) == 8


def test_progress_is_reported(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    search_trees(
        evaluator(),
        space(LARGE),
        num_trials=12,
        storage=tmp_path / "j",
        documents="x",
        report=lambda *args: said.append(args),
    )
    assert [(done, of) for done, of, _ in said] == [(number, 12) for number in range(13)], "0 is the sweep"
    assert "best so far" in said[0][2]


@pytest.mark.parametrize(
    "storage", ["sqlite:////nowhere/at/all/study.db", "nonsense", "postgresql+nodriver://localhost/x"]
)
def test_a_storage_that_does_not_answer_is_refused(storage: str) -> None:
    with pytest.raises(UserError, match=r"the storage does not answer .*; check the URL and its driver") as refused:
        search_trees(evaluator(), space(LARGE), num_trials=1, storage=storage, documents="x")
    assert storage in str(refused.value) and "\n" not in str(refused.value)


def test_finalists_differ_in_policy_or_visual_keep() -> None:
    """Two neighbours of one winner would be measured for nothing."""

    def candidate(policy: str, keep: float, ms: float) -> Candidate:
        return Candidate(Configuration(tree={"policy": policy}, visual_keep=keep), policy, ms, 2.0, 3.0, 1.0)

    fastest_first = [
        candidate("sage", 0.5, 1.0),
        candidate("sage", 0.5, 1.1),
        candidate("sage", 1.0, 1.2),
        candidate("chain", 0.5, 1.3),
        candidate("sage", 1.0, 1.4),
        candidate("chain", 1.0, 1.5),
    ]
    assert [c.ms_per_token for c in choose_finalists(fastest_first, 3)] == [1.0, 1.2, 1.3]
    assert [c.ms_per_token for c in choose_finalists(fastest_first, 9)] == [1.0, 1.2, 1.3, 1.5]


# ---------------------------------------------------------------------------------------------------------- without torch

WITHOUT_TORCH = """
import sys
from pathlib import Path
import autotune.acceptance.trace, autotune.acceptance.replay, autotune.cost.table, autotune.decoding_profile
import autotune.search.space
from autotune.search import study
from autotune.search.space import Configuration, SearchSpace
from tests.documents import DRAFT, cost_table, random_trace, surface

study.PUBLISHED_DEFAULTS = {}
trees = {"sage": {"k": {"low": 2, "high": 4}, "d_max": {"low": 3, "high": 4}, "upper": {"low": 3.0, "high": 5.0}}}
space = SearchSpace.model_validate({"name": "x", "visual_keep": {"choices": [1.0]}, "trees": trees})
evaluator = study.Evaluator([random_trace(0)], cost_table(), DRAFT)
found = study.search_trees(evaluator, space, num_trials=5, storage=Path(sys.argv[1]), documents="x")
assert len(found) >= 2 and found[0].speedup > 0
loaded = {"torch", "transformers"} & set(sys.modules)
assert not loaded, loaded
"""


def test_searching_over_documents_loads_no_torch(tmp_path: Path) -> None:
    """In a process of its own, for this one has torch loaded already."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "journal")], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_published_defaults_are_replayed_where_the_traces_reach() -> None:
    found = evaluator()
    reached = [default for default in PUBLISHED_DEFAULTS.values() if found.can_replay(default)]
    for default in PUBLISHED_DEFAULTS.values():
        policy = parse_policy(default.tree)
        bounds = next(iter(found.traces.values())).header.bounds
        fits = policy.num_proposals <= bounds.num_proposals and policy.max_depth <= bounds.depth
        assert (default in reached) == (fits and default.visual_keep in found.traces)


def test_real_defaults_are_within_the_default_bounds() -> None:
    """What records by default can replay every published default."""
    from autotune.acceptance.trace import ForestBounds

    bounds = ForestBounds()
    for default in PUBLISHED_DEFAULTS.values():
        policy = parse_policy(default.tree)
        assert policy.num_proposals <= bounds.num_proposals and policy.max_depth <= bounds.depth
