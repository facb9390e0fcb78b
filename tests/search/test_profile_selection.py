"""Finalists, operating points and the measured profile, with given times instead of the clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.console import Console
from autotune.documents.condition import Condition
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, DecodingProfile, OperatingPoint
from autotune.documents.published_defaults import COMPARED_DEFAULTS
from autotune.documents.search_space import SearchSpace
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Race, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runtime_arms import RuntimeArm
from autotune.recording.traces import record_traces
from autotune.replay.evaluator import Candidate, Evaluator
from autotune.runtime.draft_variants import variants_of
from autotune.runtime.model_pool import ModelPool
from autotune.search import finalists, profile_selection
from autotune.search.evidence import Evaluation, measured_point
from autotune.search.finalists import estimated_speedup, published_defaults, winner_of
from autotune.search.plan import StageClock
from autotune.search.profile_selection import ProfileSelection
from autotune.search.thresholds import KEPT_PROMPTS, MIN_PROMPTS
from autotune.search.tree_search import search_trees
from autotune.search.tuning_prompts import TuningPrompts
from autotune.study.ledger import Ledger
from autotune.study.spaces import bounds_of
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload, load_workload
from tests.evaluation.sample_runs import run
from tests.sample_documents import cost_table, write_image, write_workload
from tests.tiny_models import Pair

SPACE = SearchSpace.model_validate(
    {
        "name": "x",
        "visual_keep": {"choices": [1.0, 0.5]},
        "trees": {"chain": {"depth": {"low": 1, "high": 4}}, "eagle2": {"k": {"choices": [2]}, "depth": {"choices": [3]}}},
    }
)  # fmt: skip
TOKENS = 11
Speed = Callable[[Arm, WorkloadPrompt], float]


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workload, Workload]:
    folder = tmp_path_factory.mktemp("prompts")
    images = [write_image(folder / "0.png", 0)]
    known: dict[str, Any] = {"images": images, "task": "read", "max_new_tokens": 24}
    lines = [
        {**known, "prompt": f"Read {number} rows to {split}.", "split": split, "temperature": float(number % 2)}
        for split, count in (("tune", 16), ("evaluate", 4))
        for number in range(count)
    ]
    path = str(write_workload(folder, lines))
    return load_workload(path, "tune"), load_workload(path, "evaluate")


@pytest.fixture(scope="module")
def selection(
    pair: Pair, workloads: tuple[Workload, Workload], tmp_path_factory: pytest.TempPathFactory
) -> ProfileSelection:
    """A selection after a tree search over real traces of the tiny pair."""
    folder = tmp_path_factory.mktemp("study")
    model_pool = ModelPool(str(pair.target_folder), [str(pair.draft_folder)], "cpu")
    known = cost_table()
    drafts = [known.drafts[0].model_copy(update={"draft": draft}) for draft in model_pool.references.values()]
    table = known.model_copy(update={"drafts": drafts, "target": model_pool.target_reference})
    traces = record_traces(
        model_pool, variants_of(model_pool, SPACE), workloads[0], folder, Console(), bounds=bounds_of(SPACE)
    )
    tune, evaluate = workloads
    prompts = TuningPrompts.of(tune, Evaluator(traces, table))
    found = search_trees(prompts.choosing, SPACE, Ledger(folder / "ledger.sqlite"), num_trials=0, documents="x")
    clock = StageClock(time.monotonic() + 3600)
    return ProfileSelection(found, model_pool, prompts, folder, evaluate, 0, KEPT_PROMPTS[0], clock, Console())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the decoding time of every arm and prompt, and the nodes of every arm."""

    def set_speed(speed: Speed, nodes: Callable[[Arm], int] = lambda arm: 10) -> None:
        def decode(arm: RuntimeArm, prompt: WorkloadPrompt) -> Decoded:
            known = {"prompt_sha256": prompt.sha256, "task": prompt.settings.task, "verified_nodes": nodes(arm)}
            return run(TOKENS * speed(arm, prompt), arm=arm.key, tokens=TOKENS, **known)

        monkeypatch.setattr(RuntimeArm, "decode", decode)
        monkeypatch.setattr(ArmRunner, "keep", lambda *_: None)  # each test has other times

    return set_speed


def finalists_of(selection: ProfileSelection) -> list[Candidate]:
    return [selection.prompts.confirming.with_fallback(one) for one in selection.trees.fastest[:4]]


def test_fastest_finalist_in_real_runs_wins(selection: ProfileSelection, clock: Callable[..., None]) -> None:
    """On the prompts that did not choose the trees; the stored prediction is for the prompts that were run."""
    finalists = finalists_of(selection)
    clock(lambda arm, prompt: {AR: 10.0, "finalist 3": 5.0, "sage": 8.0}.get(arm.name, 6.0))
    measured = selection.measure_finalists(finalists)
    assert measured.winner.configuration == finalists[2].configuration
    assert [one.configuration.label for one in measured.finalists] == [one.configuration.label for one in finalists]
    assert [one.speedup for one in measured.finalists] == pytest.approx([10 / 6, 10 / 6, 2.0, 10 / 6])
    assert [one.is_eliminated for one in measured.finalists] == [True, True, False, True]
    confirming = selection.prompts.confirming
    assert len(confirming.tasks) == 8
    for one, candidate in zip(measured.finalists, finalists, strict=True):
        assert one.num_runs == 8
        replayed_ms = confirming.replay(candidate.configuration).decode_ms
        assert one.predicted_speedup == pytest.approx(confirming.ar_ms.sum() / replayed_ms.sum())
        assert one.interval90 is not None and one.interval90[0] < one.predicted_speedup < one.interval90[1]


def test_published_defaults_run_beside_the_finalists(
    selection: ProfileSelection, clock: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them; those that are not significantly slower than the fastest default are compared on held-out
    prompts.
    """
    clock(lambda arm, prompt: {AR: 10.0, "sage": 7.0, "chain": 7.0}.get(arm.name, 5.0 if "final" in arm.name else 8.0))
    measured = selection.measure_finalists(finalists_of(selection))
    assert [default.name for default in measured.defaults] == list(COMPARED_DEFAULTS)
    assert sorted(measured.best_defaults) == ["chain", "sage"]
    assert {default.name: default.is_eliminated for default in measured.defaults}["eagle2"]
    assert re.search(r"eagle2 .* 1\.25x", capsys.readouterr().err)


def test_a_published_default_wins_if_it_is_the_fastest(selection: ProfileSelection, clock: Callable[..., None]) -> None:
    """The profile then has its configuration, also where no trace predicts it, and is as fast as the best default."""
    for name in ("chain", "dream"):
        clock(lambda arm, prompt, name=name: {AR: 10.0, name: 4.0, "tuned": 4.0}.get(arm.name, 5.0))
        document = selection.measured_profile()
        (point,) = document.points
        default = published_defaults(selection.model_pool)[name]
        configuration = configuration_of(point)
        assert configuration is not None and configuration.key == default.key
        assert (point.predicted is None) == (not selection.evaluator.can_replay(default))
        assert document.evidence.best_default == name
        assert {gain.over: gain.speedup for gain in document.evidence.gains}[name] == pytest.approx(1.0)


def race_of(ms: Mapping[str, Sequence[float]], nodes: Mapping[str, int]) -> Race:
    """Runs with these decoding times of each arm, none of which was eliminated; every run is of one round."""
    runs = {
        name: [run(arm_ms, verified_nodes=nodes.get(name, 10), rounds=1) for arm_ms in times]
        for name, times in ms.items()
    }
    return Race(runs, [*ms])


NOISY, NOISY_TOO = [4.0, 6.0, 5.0, 5.2], [6.0, 4.0, 5.3, 5.0]


def test_finalists_that_measure_alike_are_told_apart_by_their_estimates() -> None:
    """Estimates correct predictions for all prompts by the measurements; of nearly equal estimates, the smaller tree
    wins.
    """
    alike = race_of({"A": NOISY, "B": NOISY_TOO}, {"A": 5, "B": 20})
    assert winner_of(alike, {"A": 2.0, "B": 2.1}) == "B"
    assert winner_of(alike, {"A": 2.1, "B": 2.0}) == "A"
    assert winner_of(alike, {"A": 2.0, "B": 2.005}) == "A", "the smaller tree"
    slower = race_of({"A": NOISY, "B": [9.0, 9.5, 9.0, 9.2]}, {})
    assert winner_of(slower, {"A": 2.0, "B": 3.0}) == "A", "B is significantly slower"


def test_no_finalist_wins_that_measured_slower_than_a_default() -> None:
    ms = {"A": NOISY, "B": NOISY_TOO, "sage": [4.5, 5.5, 5.1, 5.15]}
    assert sum(NOISY) < sum(ms["sage"]) < sum(NOISY_TOO)
    assert winner_of(race_of(ms, {}), {"A": 2.0, "B": 2.5}) == "A"
    ms["sage"] = [4.0, 4.0, 4.0, 4.0]
    assert winner_of(race_of(ms, {}), {"A": 2.0, "B": 2.5}) == "sage"


def test_a_shorter_answer_is_no_gain() -> None:
    """Speeds are times per token."""
    runs = {"A": [run(10.0, tokens=11)] * 4, "short": [run(9.0, tokens=6)] * 4}
    assert winner_of(Race(runs, ["short", "A"]), {"A": 1.0, "short": 2.0}) == "A"


def test_ties_go_to_the_smaller_tree(selection: ProfileSelection, clock: Callable[..., None]) -> None:
    """Tree sizes are those of the runs. Where all tuning prompts are run, estimates are what was measured."""
    prompts = replace(selection.prompts, full=selection.prompts.confirming)
    finalists = finalists_of(selection)
    sizes = {"finalist 2": 10, "finalist 4": 5}
    clock(
        lambda arm, prompt: {AR: 10.0}.get(arm.name, 5.0 if "final" in arm.name else 6.0),
        nodes=lambda arm: sizes.get(arm.name, 20),
    )
    measured = replace(selection, prompts=prompts).measure_finalists(finalists)
    assert measured.winner.configuration == finalists[3].configuration


def test_the_estimate_is_of_all_tuning_prompts(selection: ProfileSelection, clock: Callable[..., None]) -> None:
    """The predicted speedup there, times measured over predicted speedup on the prompts that were run."""
    clock(lambda arm, prompt: {AR: 10.0}.get(arm.name, 5.0 if "final" in arm.name else 6.0))
    for finalist in selection.measure_finalists(finalists_of(selection)).finalists:
        there, here = (
            evaluator.ar_ms.sum() / evaluator.replay(finalist.configuration).decode_ms.sum()
            for evaluator in (selection.evaluator, selection.prompts.confirming)
        )
        assert estimated_speedup(finalist, selection.evaluator) == pytest.approx(2.0 * there / here)
    left = finalist.model_copy(update={"predicted_speedup": None})  # its trees leave the traces of these prompts
    assert estimated_speedup(left, selection.evaluator) == finalist.speedup


def test_little_time_measures_fewer_arms(
    selection: ProfileSelection, clock: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The fastest by prediction, and no fewer than two finalists and two defaults."""
    late = replace(selection, clock=StageClock(time.monotonic() - 1))
    clock(lambda arm, prompt: 10.0 if arm.name == AR else 5.0)
    measured = late.measure_finalists(finalists_of(selection))
    assert len(measured.finalists) == len(measured.defaults) == 2
    assert "2 of 4 finalists and 2 of 6 published defaults are measured" in capsys.readouterr().err.replace("\n", " ")


def test_operating_point_must_be_faster_in_real_runs(
    selection: ProfileSelection, clock: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Faster than the winner and than the best published default."""
    winner, other = finalists_of(selection)[:2]
    points = [(Condition(workload="read"), other)]
    clock(lambda arm, prompt: 6.0 if arm.name == "chain" else 10.0)
    measured = selection.measure_finalists([winner])
    measured = replace(measured, winner=measured.finalists[0])
    for point, default in ((4.99, 10.0), (4.0, 4.0)):
        clock(lambda arm, prompt, ms=point, by=default: {"winner": 5.0, "point": ms, "default": by}[arm.name])
        assert selection.confirmed(points, measured) == []
    capsys.readouterr()
    clock(lambda arm, prompt: {"winner": 5.0, "point": 4.0, "default": 6.0}[arm.name])
    kept = selection.confirmed(points, measured)
    printed = capsys.readouterr().err
    assert re.search(rf"1 +0\.80 +0\.67 +{MIN_PROMPTS} +yes", printed), "a significant difference ends the runs"
    assert "workload read: " in printed and max(map(len, printed.splitlines())) <= 120
    assert [when.workload for when, _ in kept] == ["read"]
    assert kept[0][1].tree == other.configuration.tree


def test_points_are_measured_on_the_prompts_that_they_decode() -> None:
    """Points that decoded nothing have no measurement."""
    plain = [run(10.0 * TOKENS, tokens=TOKENS) for _ in range(3)]
    runs = [run(ms * TOKENS, tokens=TOKENS, point=number) for ms, number in ((5.0, 0), (4.0, 0), (2.0, 1))]
    first, second = (measured_point(number, runs, plain) for number in (0, 1))
    assert first is not None and (first.num_prompts, first.speedup) == (2, pytest.approx(20 / 9))
    assert second is not None and (second.num_prompts, second.speedup) == (1, pytest.approx(5.0))
    assert measured_point(2, runs, plain) is None


def test_the_first_block_of_finalists_is_whole(
    selection: ProfileSelection, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the deadline of the race, a share of the stage's, may come before its end."""
    clock(lambda arm, prompt: 5.0)
    blocks: list[tuple[int, int]] = []

    def observed(*arguments: Any, **settings: Any) -> Race:
        blocks.append((settings["time_limit"].min_prompts, arguments[3].prompts_per_block))
        return race(*arguments, **settings)

    monkeypatch.setattr(finalists, "race", observed)
    selection.measure_finalists(selection.candidates(2))
    assert blocks and blocks[0][0] == blocks[0][1]


@pytest.mark.parametrize(("seconds", "fitting"), [(41.0, (8, 2, 2)), (39.0, (8, 1, 1)), (23.0, (4, 2, 2))])
def test_finalists_run_as_the_plan_has_kept_time_for(
    selection: ProfileSelection, monkeypatch: pytest.MonkeyPatch, seconds: float, fitting: tuple[int, int, int]
) -> None:
    """An arm takes a second for a prompt, and time is kept for eight prompts of plain decoding, a finalist and a
    default.
    """
    monkeypatch.setattr(finalists, "block_s", lambda configurations, _, prompts: prompts * (1.0 + len(configurations)))
    candidates = {f"finalist {n}": candidate for n, candidate in enumerate(finalists_of(selection))}
    deadline = time.monotonic() + seconds
    deadlines = {(8, 4, 2): deadline, (8, 2, 2): deadline, KEPT_PROMPTS[2][1:]: deadline}
    num_prompts, arms, defaults = finalists._fitting(
        candidates, COMPARED_DEFAULTS, selection.prompts.confirming, deadlines
    )
    assert (num_prompts, len(arms), len(defaults)) == fitting


def test_profile_has_the_measurements(selection: ProfileSelection, clock: Callable[..., None]) -> None:
    clock(lambda arm, prompt: {AR: 10.0, "hf": 12.0, "tuned": 4.0}.get(arm.name, 4.0 if "final" in arm.name else 5.0))
    document = selection.measured_profile()
    (point,) = document.points
    assert point.measured is not None and point.measured.speedup == pytest.approx(2.5)
    assert point.measured.num_prompts == 4 and point.measured.identical_outputs == 4
    evidence = document.evidence
    compared = {one.name: one for one in evidence.compared}
    assert list(compared)[:2] == [AR, "hf"] and list(compared)[-1] == "tuned"
    assert compared["tuned"].speedup == pytest.approx(2.5) and compared["chain"].speedup == pytest.approx(2.0)
    assert evidence.configurations_replayed == selection.trees.num_replayed == 2 * (4 + 1)
    assert len(evidence.prompts) == 4
    assert {gain.over: gain.speedup for gain in evidence.gains} == pytest.approx(
        {AR: 2.5, "hf": 3.0, evidence.best_default: 1.25}
    )
    configuration = configuration_of(point)
    assert configuration is not None
    assert configuration.tree_label in [one.configuration.tree_label for one in selection.trees.fastest]
    shrinkage = evidence.shrinkage
    assert shrinkage is not None and (shrinkage.num_runs or 0) >= 4
    assert (shrinkage.measured_on_confirming, shrinkage.measured_on_held_out) == pytest.approx((2.5, 2.5))
    choosing, confirming = selection.prompts.choosing, selection.prompts.confirming
    assert shrinkage.predicted_on_choosing == pytest.approx(choosing.evaluate(configuration).speedup)
    assert shrinkage.predicted_on_confirming == pytest.approx(confirming.evaluate(configuration).speedup)
    assert point.predicted is not None and point.predicted.interval90 is not None
    assert point.predicted.interval90[0] < point.predicted.speedup < point.predicted.interval90[1]


def test_best_default_is_decided_on_held_out_prompts(selection: ProfileSelection, clock: Callable[..., None]) -> None:
    """Defaults that are tied on tuning prompts run until one is significantly slower."""
    prompts = tuple(replace(prompt, name=f"{n}") for n in range(5) for prompt in selection.evaluate.prompts)
    more = replace(selection, evaluate=Workload("x", "evaluate", prompts))

    def speed(arm: Arm, prompt: WorkloadPrompt) -> float:
        if arm.name == "sage" and prompt.settings.split == "evaluate":
            return 6.0
        return {AR: 10.0, "tuned": 4.0, "chain": 5.0, "sage": 5.0}.get(arm.name, 4.0 if "final" in arm.name else 8.0)

    clock(speed)
    document = more.measured_profile()
    compared = {one.name: one for one in document.evidence.compared}
    assert {name: one.num_prompts for name, one in compared.items()} == {
        **dict.fromkeys((AR, "hf", "chain", "tuned"), 20),
        "sage": 8,
    }
    assert document.evidence.best_default == "chain"
    assert {gain.over: gain.speedup for gain in document.evidence.gains}["chain"] == pytest.approx(1.25)


def evaluated(
    selection: ProfileSelection, profile: DecodingProfile, defaults: dict[str, Configuration], folder: Path
) -> Evaluation:
    """The profile on the held-out prompts, beside published defaults."""
    clock = StageClock(time.monotonic() + 60)
    return replace(selection, folder=folder, kept_prompts=(4, 4, 2, 2), clock=clock).evaluation(profile, defaults)


def test_defaults_that_replay_has_beaten_are_not_decoded_again(
    selection: ProfileSelection, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beaten in nine of ten draws. The best one of the tuning prompts runs in any case."""
    beaten = COMPARED_DEFAULTS["sage"].tree, COMPARED_DEFAULTS["chain"].tree
    monkeypatch.setattr(Evaluator, "can_replay", lambda self, configuration: True)
    monkeypatch.setattr(
        profile_selection, "_is_slower", lambda configuration, than, evaluator: configuration.tree in beaten
    )
    monkeypatch.setattr(Evaluator, "evaluate", lambda self, configuration: selection.trees.fastest[0])
    clock(lambda arm, prompt: {AR: 10.0, "tuned": 4.0}.get(arm.name, 5.0))
    winner = finalists_of(selection)[0].configuration
    profile = selection.profile_of(selection.model_pool.device, [(Condition(), winner)])
    defaults = {name: default for name, default in published_defaults(selection.model_pool).items() if name != "star"}
    ordered = {name: defaults[name] for name in ("sage", "eagle2", "chain")}
    evaluation = evaluated(selection, profile, ordered, selection.folder)
    assert list(evaluation.runs) == [AR, "hf", "sage", "eagle2", "tuned"]


def test_a_default_that_was_tuned_to_is_not_decoded_twice(
    selection: ProfileSelection, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the runs of the profile, and is the best default where no other one is faster."""
    monkeypatch.setattr(profile_selection, "_is_slower", lambda configuration, than, evaluator: False)
    defaults = published_defaults(selection.model_pool)
    ordered = {name: defaults[name] for name in ("chain", "sage")}
    profile = selection.profile_of(selection.model_pool.device, [(Condition(), defaults["chain"])])
    for sage_ms, best in ((5.0, "chain"), (3.0, "sage")):
        decoded: list[str] = []

        def speed(arm: Arm, prompt: WorkloadPrompt, sage_ms: float = sage_ms, decoded: list[str] = decoded) -> float:
            decoded.append(arm.name)
            return {AR: 10.0, "tuned": 4.0, "sage": sage_ms}.get(arm.name, 8.0)

        clock(speed)
        evaluation = evaluated(selection, profile, ordered, selection.folder / best)
        assert "chain" not in decoded and evaluation.runs["chain"] == evaluation.runs["tuned"]
        assert evaluation.best_default == best


def test_gains_are_told_by_task() -> None:
    """Each with an interval of its own, and all tasks together."""
    runs = {
        AR: [run(10.0, task=task) for task in ("read", "read", "add")],
        "hf": [run(12.0, task=task) for task in ("read", "read", "add")],
        "chain": [run(ms, task=task) for ms, task in ((6.0, "read"), (6.0, "read"), (8.0, "add"))],
        "tuned": [run(ms, task=task) for ms, task in ((4.0, "read"), (6.0, "read"), (5.0, "add"))],
    }
    gains = {(gain.task, gain.over): gain for gain in Evaluation(runs, {}, {}, "chain").gains}
    assert gains["read", AR].speedup == pytest.approx(2.0) and gains["add", "chain"].speedup == pytest.approx(1.6)
    assert gains["all", "hf"].speedup == pytest.approx(36 / 15) and gains["all", "hf"].num_prompts == 3
    low, high = gains["read", AR].ci95
    assert low == pytest.approx(10 / 6) and high == pytest.approx(2.5)
    one_task = {name: arm_runs[:2] for name, arm_runs in runs.items()}
    assert {gain.task for gain in Evaluation(one_task, {}, {}, None).gains} == {"all"}


def test_profile_decodes_plainly_if_the_draft_is_slower_on_held_out_prompts(
    selection: ProfileSelection, clock: Callable[..., None]
) -> None:
    """The measurements of the draft remain in the evidence."""
    clock(lambda arm, prompt: {AR: 10.0, "tuned": 11.0}.get(arm.name, 5.0))
    document = selection.measured_profile()
    (point,) = document.points
    assert point.draft is None and point.tree is None and configuration_of(point) is None
    assert point.measured is not None and point.measured.speedup == 1.0
    assert {one.name: one.speedup for one in document.evidence.compared}["tuned"] == pytest.approx(10 / 11)
    times_ms = [one.decode_ms for one in document.evidence.prompts]
    assert set(times_ms) == {10.0 * TOKENS} and times_ms == document.evidence.plain_ms, (
        "a check compares with plain decoding"
    )


def test_profile_for_another_device_has_predictions_only(selection: ProfileSelection) -> None:
    points: list[OperatingPoint] = selection.predicted_profile().points
    fastest = selection.trees.fastest[0]
    assert all(point.measured is None for point in points)
    if fastest.speedup >= 1.0:
        assert points[-1].predicted is not None and points[-1].tree is not None
        assert points[-1].predicted.speedup == selection.evaluator.with_fallback(fastest).speedup
    else:
        assert [point.tree for point in points] == [None]
