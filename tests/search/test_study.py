"""The search over trees: without torch, repeatable, resumable, and no worse than trying everything."""

from __future__ import annotations

import dataclasses
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
from autotune.search.ledger import Ledger
from autotune.search.space import PUBLISHED_DEFAULTS, Configuration, SearchSpace
from autotune.search.study import Candidate, Constraints, Evaluator, choose_finalists, search_trees
from autotune.subnet import Subnet
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


def evaluator(constraints: Constraints | None = None, jobs: int | None = None) -> Evaluator:
    traces = [random_trace(int(10 * keep), visual_keep=keep) for keep in KEEPS]
    return Evaluator(traces, cost_table(), constraints=constraints, jobs=jobs)


def place(keep: float) -> tuple[str, Subnet]:
    return DRAFT.id, Subnet(visual_keep=keep)


def search(found: Evaluator, trees: dict[str, Any], storage: Path | str, **options: Any) -> list[Candidate]:
    settings = {"num_trials": 30, "documents": "x", **options}
    return search_trees(found, space(trees), Ledger(storage), **settings)


def figures(candidates: list[Candidate]) -> list[tuple[str, float]]:
    return [(candidate.configuration.key, candidate.ms_per_token) for candidate in candidates]


# ------------------------------------------------------------------------------------------------------------ evaluator


def test_a_candidate_is_its_replay() -> None:
    found = evaluator()
    configuration = Configuration(tree={"policy": "sage", "k": 4, "d_max": 4}, subnet=Subnet(visual_keep=0.5))
    candidate = found.evaluate(configuration)
    replayed = replay(found.traces[place(0.5)], parse_policy(configuration.tree), found.prices[place(0.5)])
    assert candidate.ms_per_token == replayed.decode_ms.sum() / replayed.tokens.sum()
    assert candidate.tokens_per_round == replayed.tokens.sum() / replayed.rounds.sum()
    assert candidate.nodes_per_round == replayed.verified_nodes.sum() / replayed.rounds.sum()
    whole = found.traces[place(1.0)]
    plain = plain_decode_ms(whole, found.prices[place(1.0)]).sum() / whole.num_tokens
    assert found.ar_ms_per_token == pytest.approx(plain)
    assert candidate.speedup == pytest.approx(plain / candidate.ms_per_token)


def test_a_configuration_is_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(study_module, "replay", lambda *args: calls.append(args) or replay(*args))
    found = evaluator()
    configuration = Configuration(tree={"policy": "chain", "depth": 2})
    assert found.evaluate(configuration) is found.evaluate(configuration)
    assert len(calls) == 1


def test_a_subnet_without_a_trace_is_refused() -> None:
    with pytest.raises(
        UserError, match=rf"no trace has {DRAFT.id} keep=0\.3; there are {DRAFT.id} keep=1; .*record it, or"
    ):
        evaluator().evaluate(Configuration(tree={"policy": "chain"}, subnet=Subnet(visual_keep=0.3)))


def test_what_a_configuration_leaves_open_is_the_draft_s_own() -> None:
    """Published defaults name neither a draft nor the layer that it reads."""
    layers = [Subnet(injection_layer=layer) for layer in (3, 4)]
    traces = [random_trace(number) for number in range(2)]
    traces = [
        dataclasses.replace(trace, header=trace.header.model_copy(update={"subnet": subnet}))
        for trace, subnet in zip(traces, layers, strict=True)
    ]
    found = Evaluator(traces, cost_table())
    default = Configuration(tree={"policy": "chain", "depth": 3})
    own = default.model_copy(update={"draft": DRAFT.id, "subnet": layers[1]})
    other = own.model_copy(update={"subnet": layers[0]})
    assert found.evaluate(default) == found.evaluate(own) != found.evaluate(other)


def test_short_prompts_are_within_their_own_table() -> None:
    """The table that ``autotune search`` measures for a workload prices every tree along it."""
    lengths, _ = kv_lengths_for(20, 60)
    flat = surface(lambda n, m: 1.0, kv_lengths=lengths)
    table = cost_table(decode=surface(lambda n, m: 1.0, tokens=(1,), kv_lengths=lengths), verify=flat)
    costs = table.drafts[0].model_copy(update={"propose": flat})
    Evaluator([random_trace(0)], table.model_copy(update={"drafts": [costs]}))


def test_trees_larger_than_the_table_are_refused() -> None:
    found = evaluator()
    assert found.prices[place(1.0)].verify_ms.shape[0] - 1 == 65
    with pytest.raises(UserError, match="65"):
        found.evaluate(Configuration(tree={"policy": "sage", "k": 4, "d_max": 4, "n_max": 128}))


def test_ties_go_to_the_smaller_tree() -> None:
    same = [
        Candidate(Configuration(tree={"policy": "chain", "depth": d}), str(d), 1.0, 2.0, float(d), 1.0)
        for d in (4, 2, 3)
    ]
    assert [candidate.nodes_per_round for candidate in sorted(same, key=study_module._rank)] == [2.0, 3.0, 4.0]


# --------------------------------------------------------------------------------------------------------------- search


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traces here are tiny; so is what their space is swept with."""
    monkeypatch.setattr(study_module, "NUM_SWEPT", 32)
    monkeypatch.setattr(study_module, "SWEPT_AT_ONCE", 32)


def test_many_at_once_are_what_each_is_alone() -> None:
    """On all cores, over both visual keeps, every policy."""
    trees = [
        {"policy": "chain", "depth": 2},
        {"policy": "sage", "k": 4, "d_max": 4},
        {"policy": "eagle2", "k": 2, "depth": 3, "budget": 4},
        {"policy": "wetap", "top_k": 3, "length": 4, "w_min": 2, "w_max": 4, "budget": 6},
        {"policy": "static", "paths": [[0], [1], [0, 0], [0, 1]]},
    ]
    wanted = [Configuration(tree=tree, subnet=Subnet(visual_keep=keep)) for tree in trees for keep in KEEPS] * 2
    together, alone = evaluator(), evaluator()
    assert together.evaluate_many(wanted) == [alone.evaluate(one) for one in wanted]
    assert together.prompt_ms(wanted).sum(1) / together.prompt_tokens.sum() == pytest.approx(
        [alone.evaluate(one).ms_per_token for one in wanted]
    )


def test_tpe_begins_with_the_best_of_an_even_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may find better ones, and never ends with less."""
    begun: list[float] = []
    finished = study_module._finished
    monkeypatch.setattr(
        study_module, "_finished", lambda parameters, ms, known: begun.append(ms) or finished(parameters, ms, known)
    )
    found = evaluator()
    best = sorted(
        found.evaluate(Configuration(tree=tree, subnet=Subnet(visual_keep=keep))).ms_per_token
        for keep in KEEPS
        for tree in space(LARGE).sweep("sage", 32, 5)
    )
    candidates = search(evaluator(), LARGE, tmp_path / "l", seed=5)
    assert begun[: study_module.NUM_KEPT] == pytest.approx(best[: study_module.NUM_KEPT])
    assert candidates[0].ms_per_token <= best[0]


def test_static_trees_come_from_the_dynamic_programme(tmp_path: Path) -> None:
    found = evaluator()
    of_static = {"static": {"budget": {"low": 1, "high": 6}, "depth": {"low": 1, "high": 3}}}
    candidates = search(found, of_static, tmp_path / "l", num_trials=1)
    assert len(candidates) > 6 and {c.configuration.visual_keep for c in candidates} == {*KEEPS}
    for candidate in candidates:
        policy = parse_policy(candidate.configuration.tree)
        assert policy.policy == "static" and policy.max_nodes <= 6 and policy.max_depth <= 3


def test_a_round_s_price_adds_up_to_what_its_rounds_cost() -> None:
    """In plain steps: rounds, draft forwards and nodes by the price are the replayed time, but for the draft's prefill."""
    found = evaluator()
    for tree in ({"policy": "chain", "depth": 3}, {"policy": "sage", "k": 4, "d_max": 4}):
        wanted = Configuration(tree=tree)
        replayed, price = found.replay(wanted), found.round_price(wanted)
        steps = price.round_steps * replayed.rounds.sum() + price.level_steps * replayed.draft_forwards.sum()
        steps += price.node_steps * replayed.verified_nodes.sum()
        expected = (replayed.decode_ms - replayed.draft_prefill_ms).sum() / found.ar_ms_per_token
        assert steps == pytest.approx(expected)
        guarded = found.guarded(found.evaluate(wanted))
        assert guarded.configuration.fallback == price and guarded.key != found.evaluate(wanted).key


def test_a_tiny_space_is_searched_whole(tmp_path: Path) -> None:
    """The same best as trying everything, and what is behind it in the same order."""
    found = evaluator()
    candidates = search(found, SMALL, tmp_path / "ledger", num_trials=3)
    everything = [{"policy": "chain", "depth": depth} for depth in range(1, 5)]
    everything += [
        {"policy": "sage", "k": k, "d_min": low, "d_max": high}
        for k, low, high in itertools.product((2, 4), (1, 2), (3, 4))
    ]
    by_force = sorted(
        (replay(found.traces[place(keep)], parse_policy(tree), found.prices[place(keep)]).ms_per_token, keep, str(tree))
        for keep in KEEPS
        for tree in everything
    )
    assert len(candidates) == len(by_force) == found.num_evaluated == 24
    assert [c.ms_per_token for c in candidates] == pytest.approx([ms for ms, _, _ in by_force])
    assert (candidates[0].configuration.visual_keep, str(candidates[0].configuration.tree)) == by_force[0][1:]


def test_sampling_is_repeatable(tmp_path: Path) -> None:
    """The same seed and documents find the same winner; another seed looks elsewhere."""
    runs = [
        search(evaluator(), LARGE, tmp_path / name, num_trials=70, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert figures(runs[0]) == figures(runs[1]) != figures(runs[2])
    for candidates in runs:
        assert len({c.configuration.tree["policy"] for c in candidates}) == 2
        assert [c.ms_per_token for c in candidates] == sorted(c.ms_per_token for c in candidates)


def test_a_search_goes_on_where_it_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 trials, then 120: the first 50 come from the ledger, and 70 are drawn anew."""
    drawn: list[dict[str, Any]] = []
    suggest = SearchSpace.suggest
    monkeypatch.setattr(SearchSpace, "suggest", lambda self, *a: (drawn.append(suggest(self, *a)), drawn[-1])[1])
    first = search(evaluator(), LARGE, tmp_path / "l", num_trials=50)
    assert len(drawn) == 50
    second = search(evaluator(), LARGE, tmp_path / "l", num_trials=120)
    assert len(drawn) == 120 and second[0].ms_per_token <= first[0].ms_per_token
    assert drawn[50:100] != drawn[:50], "a resumed sampler does not draw the same trees again"
    again = search(evaluator(), LARGE, tmp_path / "l", num_trials=120)
    assert len(drawn) == 120 and figures(again) == figures(second), "a finished search draws nothing"
    search(evaluator(), LARGE, tmp_path / "l", num_trials=5, documents="other traces")
    assert len(drawn) == 125, "other documents are another study"


def test_what_one_worker_finds_several_find(tmp_path: Path) -> None:
    """Whoever makes a record, and in whatever order: here every second one is made by another worker beforehand."""
    alone = search(evaluator(), LARGE, tmp_path / "alone", num_trials=60, seed=3)
    stage = study_module._Stage(
        evaluator(),
        space(LARGE),
        Ledger(tmp_path / "l"),
        [study_module.version_of("autotune"), "x", Constraints().__dict__],
        3,
    )
    made = dict(list(stage.sweeps().items())[1::2])
    stage.ledger.work("trees", made)
    calls: list[Any] = []
    replayed = study_module.replay
    found = evaluator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_module, "replay", lambda *args: calls.append(args) or replayed(*args))
        together = search(found, LARGE, tmp_path / "l", num_trials=60, seed=3)
    assert figures(together) == figures(alone)
    assert 0 < len(calls) < found.num_evaluated + len(together), "the other worker's trees were not replayed again"


WORKER = """
import sys
from pathlib import Path
from autotune.search import study
from autotune.search.ledger import Ledger
from tests.search.test_study import LARGE, evaluator, search
study.NUM_SWEPT, study.SWEPT_AT_ONCE = 256, 32
storage = sys.argv[1]
found = evaluator(jobs=1)
(first, *_) = search(found, LARGE, storage if "://" in storage else Path(storage), num_trials=120)
print(found.num_evaluated, first.key, first.ms_per_token)
"""


def test_workers_on_postgresql_find_what_one_finds(postgresql: str, tmp_path: Path) -> None:
    """Two processes at once share a database: both end with the same winner, and with all that was replayed."""
    commands = [[sys.executable, "-c", WORKER, storage] for storage in (str(tmp_path / "l"), postgresql, postgresql)]
    alone = subprocess.run(commands[0], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    workers = [subprocess.Popen(c, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for c in commands[1:]]
    assert [worker.communicate(timeout=300)[0] for worker in workers] == [alone, alone]
    assert [worker.returncode for worker in workers] == [0, 0]


def test_trials_are_shown_to_optuna(tmp_path: Path) -> None:
    """Each once, however often the same command runs."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    for _ in range(2):
        search(evaluator(), LARGE, tmp_path / "ledger", num_trials=60)
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "ledger.optuna")))
    (summary,) = optuna.get_all_study_summaries(storage)
    assert summary.n_trials == 60 and summary.study_name.startswith("trees-")


def test_past_the_deadline_nothing_is_begun(tmp_path: Path) -> None:
    """And what there is not cannot be chosen from."""
    with pytest.raises(UserError, match="no tree of space x was found that keeps to the budget; raise it"):
        search(evaluator(), LARGE, tmp_path / "l", deadline=time.monotonic() - 1)


def test_progress_is_reported(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    search(evaluator(), LARGE, tmp_path / "l", num_trials=60, report=lambda *args: said.append(args))
    sweeps = len(KEEPS) * 2  # one part of each policy
    assert [(done, of) for done, of, _ in said] == [*((n, sweeps) for n in range(sweeps + 1)), (50, 60), (60, 60)]
    assert "best so far" in said[1][2]


# ---------------------------------------------------------------------------------------------------------- constraints


def test_the_longest_round_is_a_constraint(tmp_path: Path) -> None:
    """Nothing that may exceed it is chosen, and its bound holds for every round replayed."""
    free = evaluator()
    limit = free.round_ms(place(1.0), parse_policy({"policy": "chain", "depth": 2}))
    kept = search(evaluator(Constraints(max_round_ms=limit)), LARGE, tmp_path / "l")
    assert kept and all(
        free.round_ms(place(c.configuration.visual_keep), parse_policy(c.configuration.tree)) <= limit for c in kept
    )
    assert any(
        free.round_ms(place(c.configuration.visual_keep), parse_policy(c.configuration.tree)) > limit
        for c in search(evaluator(), LARGE, tmp_path / "free")
    )
    for candidate in kept:
        result = free.replay(candidate.configuration)
        mean_ms = (result.decode_ms - result.draft_prefill_ms).sum() / result.rounds.sum()
        assert mean_ms <= limit


def test_memory_of_the_draft_is_a_constraint(tmp_path: Path) -> None:
    table = cost_table()
    costs = table.drafts[0].model_copy(update={"num_parameters": 2**18, "cache_bytes_per_token": 2**14})
    table = table.model_copy(update={"drafts": [costs], "precision": "float32"})
    found = Evaluator([random_trace(0)], table)
    small, large = ({"policy": "sage", "k": 4, "d_max": 4, "n_max": n} for n in (4, 64))
    sizes = [found.draft_mib(place(1.0), parse_policy(tree)) for tree in (small, large)]
    assert sizes[0] is not None and sizes[1] is not None and 1.0 < sizes[0] < sizes[1]
    narrow = Evaluator([random_trace(0)], table, constraints=Constraints(max_draft_mib=(sizes[0] + sizes[1]) / 2))
    assert narrow.is_feasible(place(1.0), small) and not narrow.is_feasible(place(1.0), large)


@pytest.mark.parametrize(
    ("constraints", "said"),
    [
        (
            Constraints(max_round_ms=0.01),
            r"--max-round-ms 0\.01: no tree keeps to it; a round with one drafted token takes",
        ),
        (Constraints(max_draft_mib=0.5), r"--max-draft-mib 0\.5: no draft keeps to it; the smallest takes 2"),
    ],
)
def test_constraints_that_nothing_keeps_are_named(constraints: Constraints, said: str, tmp_path: Path) -> None:
    table = cost_table()
    costs = table.drafts[0].model_copy(update={"num_parameters": 2**19, "cache_bytes_per_token": 16})
    table = table.model_copy(update={"drafts": [costs], "precision": "float32"})
    with pytest.raises(UserError, match=said):
        search(Evaluator([random_trace(0)], table, constraints=constraints), LARGE, tmp_path / "l")


# ------------------------------------------------------------------------------------------------------------ finalists


def test_finalists_are_no_neighbours_of_one_winner(tmp_path: Path) -> None:
    """The best of each subnet and policy, two of a policy at most, and none that is surely too slow."""
    found = evaluator()
    candidates = search(found, LARGE, tmp_path / "l")
    finalists = choose_finalists(candidates, found, 9, slack=10.0)
    kinds = [(c.configuration.tree["policy"], c.configuration.visual_keep) for c in finalists]
    assert sorted(kinds) == sorted((policy, keep) for policy in LARGE for keep in KEEPS)
    assert finalists[0] == candidates[0]
    assert [c.ms_per_token for c in finalists] == sorted(c.ms_per_token for c in finalists)
    assert len(choose_finalists(candidates, found, 2, slack=10.0)) == 2
    slow = found.evaluate(Configuration(tree={"policy": "chain", "depth": 4}))
    fast = candidates[0]
    assert slow.ms_per_token > 1.2 * fast.ms_per_token
    assert choose_finalists([fast, slow], found, 9, slack=0.0) == [fast]


# ---------------------------------------------------------------------------------------------------------- without torch

WITHOUT_TORCH = """
import sys
from pathlib import Path
import autotune.acceptance.trace, autotune.acceptance.replay, autotune.cost.table, autotune.decoding_profile
import autotune.search.space
from autotune.search import study
from autotune.search.ledger import Ledger
from autotune.search.space import Configuration, SearchSpace
from tests.documents import DRAFT, cost_table, random_trace, surface

trees = {"sage": {"k": {"low": 2, "high": 4}, "d_max": {"low": 3, "high": 4}, "upper": {"low": 3.0, "high": 5.0}}}
space = SearchSpace.model_validate({"name": "x", "visual_keep": {"choices": [1.0]}, "trees": trees})
evaluator = study.Evaluator([random_trace(0)], cost_table())
found = study.search_trees(evaluator, space, Ledger(Path(sys.argv[1])), num_trials=5, documents="x")
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
        assert (default in reached) == (fits and default.visual_keep in KEEPS)


def test_real_defaults_are_within_the_default_bounds() -> None:
    """What records by default can replay every published default."""
    from autotune.acceptance.trace import ForestBounds

    bounds = ForestBounds()
    for default in PUBLISHED_DEFAULTS.values():
        policy = parse_policy(default.tree)
        assert policy.num_proposals <= bounds.num_proposals and policy.max_depth <= bounds.depth
