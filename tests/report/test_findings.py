"""The report's numbers, against what trying everything says."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.acceptance.replay import plain_decode_ms
from autotune.documents.configuration import PUBLISHED_DEFAULTS, Configuration, configuration_of
from autotune.documents.subnet import Subnet
from autotune.report.ablation import SCREENING, TREES, dimension_worth, ladder, policies
from autotune.report.acceptance import acceptance, judged_runs
from autotune.report.chosen import chosen_points
from autotune.report.findings import fastest_by_place, fastest_by_size, front, grids, importance
from autotune.report.prices import curves, middle_kv_length
from autotune.report.sources import Sources, find_sources
from autotune.search.evaluator import Candidate, Evaluator
from autotune.study.records import ScreenedSubnet
from tests.report.conftest import EVIL, KEEPS, SHAPE, MadeStudy
from tests.sample_documents import DEVICE, cost_table


@pytest.fixture(scope="module")
def sources(made: MadeStudy) -> Sources:
    return find_sources(made.profile_path)


def test_the_front_is_what_nothing_beats(sources: Sources) -> None:
    def beats(one: Candidate, other: Candidate) -> bool:
        no_worse = one.ms_per_token <= other.ms_per_token and one.nodes_per_round <= other.nodes_per_round
        return no_worse and (one.ms_per_token, one.nodes_per_round) != (other.ms_per_token, other.nodes_per_round)

    kept = front(sources.candidates)
    assert len(kept) > 2
    for one in kept:
        assert not any(beats(other, one) for other in sources.candidates)
    for one in sources.candidates:
        assert any(
            other.ms_per_token <= one.ms_per_token and other.nodes_per_round <= one.nodes_per_round for other in kept
        )


def test_the_fastest_of_every_size(sources: Sources) -> None:
    by_size = fastest_by_size(sources.candidates)
    assert set(by_size) == {"chain", "eagle2"}
    for policy, found in by_size.items():
        for one in found:
            alike = [
                other.ms_per_token
                for other in sources.candidates
                if other.policy == policy and round(other.nodes_per_round) == round(one.nodes_per_round)
            ]
            assert one.ms_per_token == min(alike)


def test_the_fastest_of_every_subnet_with_its_memory(sources: Sources) -> None:
    places = fastest_by_place(sources)
    assert {one.best.configuration.visual_keep for one in places} == {*KEEPS}
    assert min(one.best.ms_per_token for one in places) == sources.candidates[0].ms_per_token
    assert all(one.draft_mib is not None and 3.8 < one.draft_mib < 4.5 for one in places)
    assert places[0].is_on_front and [one.draft_mib for one in places] == sorted(one.draft_mib or 0 for one in places)


def test_dimensions_fixed_in_turn(sources: Sources) -> None:
    """By hand: half of the heads save 0.1 ms, layer 3 saves 0.05, visual tokens next to nothing."""
    worth = {one.dimension: one for one in dimension_worth(sources)}
    best = 1.0 + 0.02 * 0.25
    assert worth["heads"].fixed_ms == pytest.approx(best + 0.1)
    assert worth["injection layer"].fixed_ms == pytest.approx(best + 0.05)
    assert worth["visual tokens"].fixed_ms == pytest.approx(1.02)
    for name in ("heads", "injection layer", "visual tokens"):
        assert (worth[name].free_ms, worth[name].stage) == (pytest.approx(best), SCREENING)
    assert worth["heads"].gain == pytest.approx(1 - best / (best + 0.1))
    assert sources.evaluator is not None
    by_force = [
        sources.evaluator.evaluate(
            Configuration(tree=tree, draft=EVIL.id, subnet=Subnet(visual_keep=keep))
        ).ms_per_token
        for keep in KEEPS
        for tree in [PUBLISHED_DEFAULTS["chain"].tree]  # the others reach beyond five levels
    ]
    tree = worth["tree"]
    assert (tree.stage, tree.fixed_ms, tree.free_ms) == (TREES, min(by_force), sources.candidates[0].ms_per_token)
    assert "draft" not in worth, "there is but one"


def test_a_dimension_with_one_value_is_worth_nothing_and_not_named(made: MadeStudy) -> None:
    only = [one for one in made.screened if one.subnet.heads is None and one.subnet.injection_layer == 4]
    assert {one.dimension for one in dimension_worth(Sources(screened=only))} == {"visual tokens"}


def test_the_ladder_frees_one_dimension_after_the_other(sources: Sources) -> None:
    rungs = ladder(sources)
    assert [rung.label for rung in rungs][1:] == ["+ visual tokens", "+ heads", "+ injection layer"]
    assert [rung.best.ms_per_token for rung in rungs] == pytest.approx([1.17, 1.155, 1.055, 1.005])


def test_the_ladder_ends_with_other_drafts(made: MadeStudy) -> None:
    other = ScreenedSubnet(draft="other", subnet=Subnet(), depth=2, tokens_per_round=2, ms_per_token=0.5, speedup=4.0)
    rungs = ladder(Sources(screened=[*made.screened, other]))
    assert rungs[-1].label == "+ draft" and rungs[-1].best == other
    assert ladder(Sources()) == []


def test_policies_beside_their_defaults(sources: Sources) -> None:
    found = {one.policy: one for one in policies(sources)}
    assert found["chain"].best == next(one for one in sources.candidates if one.policy == "chain")
    assert found["eagle2"].default_ms is None, "the traces hold no seven levels"


def test_the_grid_holds_every_subnet_where_it_belongs(made: MadeStudy) -> None:
    found = grids(made.screened)
    assert [(grid.draft, grid.layer) for grid in found] == [(EVIL.id, 3), (EVIL.id, 4)]
    for one in made.screened:
        (grid,) = (grid for grid in found if grid.layer == one.subnet.injection_layer)
        row, column = grid.heads.index(one.subnet.head_shares), grid.keeps.index(one.subnet.visual_keep)
        assert grid.speedup[row][column] == one.speedup
    (partial,) = grids(made.screened[:1] + made.screened[4:5])[:1]
    assert partial.speedup == [[None, made.screened[0].speedup]]


# --------------------------------------------------------------------------------------------------------------- importance


def trials(count: int) -> list[object]:
    """Of two policies; the time of ``a`` depends on ``a.x`` alone."""
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    rng = np.random.default_rng(0)
    found: list[object] = []
    for number in range(count):
        policy = "ab"[number % 3 == 0]
        parameters = {"policy": policy, f"{policy}.x": float(rng.random()), f"{policy}.y": float(rng.random())}
        known = {name: FloatDistribution(0, 1) for name in parameters if name != "policy"}
        found.append(
            optuna.trial.create_trial(
                params=parameters,
                distributions={"policy": CategoricalDistribution(["a", "b"]), **known},
                value=1 + 3 * parameters[f"{policy}.x"] + 0.01 * parameters[f"{policy}.y"],
            )
        )
    return found


def test_importance_is_judged_among_the_trials_of_a_policy() -> None:
    found = {one.group: one for one in importance(trials(90))}
    assert {name: one.num_trials for name, one in found.items()} == {"all trials": 90, "a": 60, "b": 30}
    assert set(found["all trials"].shares["fANOVA"]) == {"policy"}
    for kind, shares in found["a"].shares.items():
        assert shares["a.x"] > 0.8, kind
        assert sum(shares.values()) == pytest.approx(1.0)
    assert list(found["a"].shares["fANOVA"]) == ["a.x", "a.y"], "the most important first"


def test_few_trials_say_nothing() -> None:
    assert {one.group for one in importance(trials(45))} == {"all trials", "a"}
    assert importance(trials(10)) == [] == importance([])


def test_the_studys_own_trials_are_found(sources: Sources) -> None:
    assert len(sources.trials) == 40
    assert [one.group for one in importance(sources.trials)] == ["eagle2"], "of one policy all trials are its own"


# --------------------------------------------------------------------------------------------------------------- acceptance


def test_acceptance_is_of_the_points_own_prompts(sources: Sources, made: MadeStudy) -> None:
    found = acceptance(sources)
    assert [(one.when, one.num_replayed, one.num_measured) for one in found] == [
        ("workload read", 2, 2),
        ("any other request", 2, 1),
    ]
    assert found[0].measured.by_depth.sum(0)[1:3].tolist() == [[10, 8], [6, 4]], "of two runs, both places"
    rounds = found[0].replayed.by_depth.sum(0)[1, 0]
    accepted = found[0].replayed.by_depth.sum(0)[:, 1].sum()
    trace = made.traces[1]
    tokens = sum(int(trace.answer_start[p + 1] - trace.answer_start[p]) - 1 for p in (0, 2))
    assert rounds + accepted <= tokens, "plain steps emit the others"


def test_runs_of_other_arms_and_times_do_not_count(sources: Sources) -> None:
    assert len(sources.runs) == 5 and [len(judged_runs(sources, number)) for number in (0, 1)] == [2, 1]


def test_a_points_own_prediction_is_over_its_own_prompts(sources: Sources) -> None:
    """Weighted by plain decoding's time, those of the prompts make that of all of them."""
    evaluator = sources.evaluator
    assert evaluator is not None and sources.profile is not None
    first, last = chosen_points(sources)
    assert (first.num_own, last.num_own) == (2, 2)
    configuration = configuration_of(last.point)
    assert configuration is not None
    trace = sources.trace_of(last.point)
    assert trace is not None
    found = evaluator.replay(configuration)
    plain_ms = plain_decode_ms(trace, evaluator.prices[EVIL.id, trace.header.subnet])
    assert last.own_speedup == pytest.approx((plain_ms[1] + plain_ms[3]) / (found.decode_ms[1] + found.decode_ms[3]))
    assert last.own_speedup != pytest.approx(evaluator.evaluate(configuration).speedup)
    alone = Sources(profile=sources.profile)
    assert [one.own_speedup for one in chosen_points(alone)] == [None, None]


# -------------------------------------------------------------------------------------------------------------------- prices


def test_curves_are_the_tables_own(sources: Sources) -> None:
    table = sources.table
    assert table is not None
    found = {one.part: one for one in curves(table, sources.study)}
    assert middle_kv_length(table) == 256
    for point in table.verify.points:
        if point.kv_length == 256:
            assert found["target, verification"].ms(point.tokens) == pytest.approx(point.latency_ms)
    assert found["target, verification"].tokens == [1, 2, 8, 65]
    assert found["target, verification"].ms(66) is None is found["target, plain step"].ms(2)
    assert len(found) == 4 and all(one.limit_ms(1) is None for one in found.values()), "an abacus has no datasheet"


def test_a_datasheet_gives_a_limit(sources: Sources) -> None:
    """By hand: two layers launch in 0.3 ms, which is longer than reading a million parameters takes."""
    table = cost_table(EVIL).model_copy(update={"device": DEVICE.model_copy(update={"name": "h100", "kind": "cuda"})})
    verify = curves(table, sources.study)[1]
    assert [verify.limit_ms(n) for n in verify.tokens] == pytest.approx([SHAPE.num_layers * 0.15] * 4)
    assert verify.share_of_limit(8) == pytest.approx(0.3 / (1.0 + 0.02 * 8 + 0.001 * 256))
    assert curves(table, None)[1].limit_ms(1) is None, "without a study the model's shape is not known"
    estimated = table.model_copy(update={"estimated": True})
    assert curves(estimated, sources.study)[1].limit_ms(1) is None, "an estimate is the limit itself"


def test_an_evaluator_needs_a_table_that_prices_the_drafts(sources: Sources) -> None:
    assert isinstance(sources.evaluator, Evaluator)
    assert Sources(traces=sources.traces).evaluator is None
    assert Sources(traces=sources.traces, table=cost_table()).evaluator is not None, "the hash decides, not the name"
    other = cost_table(EVIL.model_copy(update={"sha256": "f" * 64}))
    assert Sources(traces=sources.traces, table=other).evaluator is None
