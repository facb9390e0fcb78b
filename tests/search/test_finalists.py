"""Finalists, the evaluation and the profile, with given times instead of the clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, HF, TUNED, DecodingProfile
from autotune.documents.published_defaults import COMPARED_DEFAULTS
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Fastest, Race, TimeLimit
from autotune.evaluation.runner import ArmRunner
from autotune.search import finalists as stage
from autotune.search.evidence import Evaluation
from autotune.search.finalists import (
    Entrants,
    Finalists,
    Races,
    estimated_speedup,
    fitting,
    measure_finalists,
    published_defaults,
    winner_of,
)
from autotune.search.held_out import evaluate_held_out
from autotune.search.profile import measured_profile, predicted_profile
from autotune.search.thresholds import KEPT_PROMPTS
from autotune.search.tuning import StageClock
from autotune.study.document import finalists_table
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.evaluation.sample_runs import run
from tests.search.conftest import PLAN, Searched

TOKENS = 11
Speed = Callable[[str, WorkloadPrompt], float]
"""Milliseconds per token of an arm, by its name."""


class FakeArm(Arm):
    """Decodes in given times."""

    def __init__(self, name: str, key: str, speed: Speed, nodes: int) -> None:
        self.name, self.key, self.speed, self.nodes = name, key, speed, nodes

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None: ...

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        known = {"prompt_sha256": prompt.sha256, "task": prompt.settings.task, "verified_nodes": self.nodes}
        return run(TOKENS * self.speed(self.name, prompt), arm=self.key, tokens=TOKENS, **known)


class GivenRaces(Races):
    """Races of fake arms; keeps the rules and limits."""

    def __init__(self, searched: Searched, speed: Speed, nodes: Mapping[str, int] | None = None) -> None:
        sizes = nodes or {}

        def arm(name: str, configuration: Configuration | None = None) -> FakeArm:
            return FakeArm(name, configuration.key if configuration else name, speed, sizes.get(name, 10))

        arms: Any = SimpleNamespace(plain=arm(AR), arm=arm)
        super().__init__(arms, ArmRunner(), searched.tuning.console)
        self.hugging_face = lambda: arm(HF)  # type: ignore[method-assign]
        self.seen: list[tuple[Fastest, TimeLimit]] = []

    def run(self, name: str, configurations: Any, prompts: Any, rule: Any, time_limit: Any, **options: Any) -> Race:
        self.seen.append((rule, time_limit))
        return super().run(name, configurations, prompts, rule, time_limit, **options)


def by_name(others: float, **ms: float) -> Speed:
    """Times of arms by name; ``finalist`` is that of all finalists."""
    return lambda name, _: ms.get(name.replace(" ", "_"), ms.get("finalist", others) if "finalist" in name else others)


def measured(searched: Searched, races: Races) -> Finalists:
    return measure_finalists(searched.tuning, PLAN, searched.prompts, searched.trees, races)


def profile_of(searched: Searched, races: Races) -> DecodingProfile:
    found = measured(searched, races)
    evaluation = evaluate_held_out(searched.tuning, PLAN, found, races)
    return measured_profile(searched.tuning, PLAN, searched.trees, found, evaluation, None)


def test_the_fastest_finalist_in_real_runs_wins(searched: Searched) -> None:
    """On the prompts that did not choose the trees; the stored prediction is for the prompts that were run, and the
    estimate for all tuning prompts: the prediction there, times measured over predicted speedup.
    """
    races = GivenRaces(searched, by_name(6.0, ar=10.0, finalist_2=5.0, sage=8.0))
    found = measured(searched, races)
    assert found.winner == found.finalists[1] and found.winner.speedup == pytest.approx(2.0)
    assert found.finalists[0].speedup == pytest.approx(10 / 6)
    assert [one.is_eliminated for one in found.finalists] == [one != found.winner for one in found.finalists]
    confirming, full = searched.prompts.confirming, searched.prompts.full
    for one in found.finalists:
        here = confirming.ar_ms.sum() / confirming.replay(one.configuration).decode_ms.sum()
        there = full.ar_ms.sum() / full.replay(one.configuration).decode_ms.sum()
        assert one.num_runs == len(confirming.tasks) == 8 and one.predicted_speedup == pytest.approx(here)
        assert one.interval90 is not None and one.interval90[0] < here < one.interval90[1]
        assert estimated_speedup(one, full) == pytest.approx(one.speedup * there / here)
    left = found.winner.model_copy(update={"predicted_speedup": None})  # its trees leave the traces of these prompts
    assert estimated_speedup(left, full) == left.speedup
    rule, limit = races.seen[0]
    assert limit.min_prompts == rule.prompts_per_block, "the first block is whole, whenever its deadline comes"


def test_published_defaults_run_beside_the_finalists(searched: Searched) -> None:
    """Defaults that are not significantly slower than the fastest one are compared on held-out prompts."""
    found = measured(searched, GivenRaces(searched, by_name(8.0, ar=10.0, sage=7.0, chain=7.0, finalist=5.0)))
    assert [default.name for default in found.defaults] == list(COMPARED_DEFAULTS)
    assert sorted(found.best_defaults) == ["chain", "sage"]
    table = finalists_table(found.defaults)
    (row,) = (row for row in table.rows if row[0] == "eagle2")
    assert row[2].startswith("1.25x") and row[4].endswith("eliminated")


NOISY, NOISY_TOO = [4.0, 6.0, 5.0, 5.2], [6.0, 4.0, 5.3, 5.0]
SLOW = [9.0, 9.5, 9.0, 9.2]


@pytest.mark.parametrize(
    ("ms", "nodes", "estimates", "winner"),
    [
        ({"A": NOISY, "B": NOISY_TOO}, {"B": 20}, {"A": 2.0, "B": 2.1}, "B"),
        ({"A": NOISY, "B": NOISY_TOO}, {"B": 20}, {"A": 2.1, "B": 2.0}, "A"),
        ({"A": NOISY, "B": NOISY_TOO}, {"B": 20}, {"A": 2.0, "B": 2.005}, "A"),  # a tie: the smaller tree
        ({"A": NOISY, "B": SLOW}, {}, {"A": 2.0, "B": 3.0}, "A"),  # B is significantly slower
        ({"A": NOISY, "B": NOISY_TOO, "sage": [4.5, 5.5, 5.1, 5.15]}, {}, {"A": 2.0, "B": 2.5}, "A"),
        ({"A": NOISY, "B": NOISY_TOO, "sage": [4.0] * 4}, {}, {"A": 2.0, "B": 2.5}, "sage"),  # both are behind
    ],
)
def test_estimates_tell_apart_what_measures_alike(
    ms: dict[str, list[float]], nodes: dict[str, int], estimates: dict[str, float], winner: str
) -> None:
    """Finalists that are slower than a default, which has no estimate, or significantly slower than any arm lose."""
    runs = {
        name: [run(arm_ms, verified_nodes=nodes.get(name, 10), rounds=1) for arm_ms in times]
        for name, times in ms.items()
    }
    assert winner_of(Race(runs, [*ms]), estimates) == winner


def test_a_shorter_answer_is_no_gain() -> None:
    """Speeds are times per token."""
    runs = {"A": [run(10.0, tokens=11)] * 4, "short": [run(9.0, tokens=6)] * 4}
    assert winner_of(Race(runs, ["short", "A"]), {"A": 1.0, "short": 2.0}) == "A"


@pytest.mark.parametrize(("seconds", "sizes"), [(41.0, (8, 2, 2)), (39.0, (8, 1, 1)), (23.0, (4, 2, 2))])
def test_finalists_run_as_the_plan_has_kept_time_for(
    searched: Searched, monkeypatch: pytest.MonkeyPatch, seconds: float, sizes: tuple[int, int, int]
) -> None:
    """An arm takes a second for a prompt, and time is kept for eight prompts of plain decoding, a finalist and a
    default.
    """
    monkeypatch.setattr(stage, "block_s", lambda configurations, _, prompts: prompts * (1.0 + len(configurations)))
    four = {f"finalist {n}": default for n, default in enumerate([*COMPARED_DEFAULTS.values()][:4])}
    times = {(8, 4, 2): seconds, (8, 2, 2): seconds, KEPT_PROMPTS[2][1:]: seconds}
    found = fitting(Entrants(four, COMPARED_DEFAULTS, 0), searched.prompts.confirming, times)
    assert (found.prompts_per_block, len(found.finalists), len(found.defaults)) == sizes


def test_little_time_measures_fewer_arms(searched: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest by prediction, and no fewer than two finalists and two defaults."""
    late = replace(searched, tuning=replace(searched.tuning, clock=StageClock(-1)))
    found = measured(late, GivenRaces(searched, by_name(5.0, ar=10.0)))
    assert len(found.finalists) == len(found.defaults) == 2
    assert re.search(r"2 of \d finalists and 2 of 6 published defaults are", capsys.readouterr().err.replace("\n", " "))


def test_the_profile_has_the_measurements(searched: Searched) -> None:
    document = profile_of(searched, GivenRaces(searched, by_name(5.0, ar=10.0, hf=12.0, tuned=4.0, finalist=4.0)))
    point, evidence = document.point, document.evidence
    assert point.measured is not None and point.measured.speedup == pytest.approx(2.5)
    assert point.measured.num_prompts == point.measured.identical_outputs == len(evidence.prompts) == 4
    compared = {one.name: one.speedup for one in evidence.compared}
    assert list(compared)[:2] == [AR, HF] and list(compared)[-1] == TUNED
    assert (compared[TUNED], compared["chain"]) == pytest.approx((2.5, 2.0))
    assert evidence.configurations_replayed == searched.trees.num_replayed == 2 * (4 + 1)
    gains = {gain.over: gain.speedup for gain in evidence.gains}
    assert gains == pytest.approx({AR: 2.5, HF: 3.0, evidence.best_default: 1.25})
    configuration = configuration_of(point)
    assert configuration is not None and (evidence.num_deciding or 0) >= 4
    assert configuration.tree_label in [one.configuration.tree_label for one in searched.trees.fastest]
    assert point.predicted is not None and point.predicted.interval90 is not None
    assert point.predicted.interval90[0] < point.predicted.speedup < point.predicted.interval90[1]
    assert document.workload.tune_sha256 == searched.tuning.tune.sha256


@pytest.mark.parametrize("name", ["chain", "dream"])
def test_a_published_default_wins_if_it_is_the_fastest(searched: Searched, name: str) -> None:
    """The profile then has its configuration, also where no trace predicts it, and is as fast as the best default."""
    document = profile_of(searched, GivenRaces(searched, by_name(5.0, **{AR: 10.0, name: 4.0, TUNED: 4.0})))
    default = published_defaults(searched.tuning.pool)[name]
    configuration = configuration_of(document.point)
    assert configuration is not None and configuration.key == default.key
    assert (document.point.predicted is None) == (not searched.prompts.full.can_replay(default))
    assert document.evidence.best_default == name
    assert {gain.over: gain.speedup for gain in document.evidence.gains}[name] == pytest.approx(1.0)


def test_the_profile_decodes_plainly_if_the_draft_is_slower_on_held_out_prompts(searched: Searched) -> None:
    """The measurements of the draft remain in the evidence; a check compares with plain decoding."""
    document = profile_of(searched, GivenRaces(searched, by_name(5.0, ar=10.0, tuned=11.0)))
    point, evidence = document.point, document.evidence
    assert point.draft is None and point.tree is None
    assert point.measured is not None and point.measured.speedup == 1.0
    assert {one.name: one.speedup for one in evidence.compared}[TUNED] == pytest.approx(10 / 11)
    assert [one.decode_ms for one in evidence.prompts] == [10.0 * TOKENS] * 4


def test_a_profile_for_another_device_has_predictions_only(searched: Searched) -> None:
    point = predicted_profile(searched.tuning, PLAN, searched.prompts, searched.trees).point
    fastest = searched.prompts.full.with_fallback(searched.trees.fastest[0])
    assert point.measured is None and point.predicted is not None
    assert (point.tree is None) == (fastest.speedup < 1.0)
    assert point.predicted.speedup == max(1.0, fastest.speedup)


def test_the_best_default_is_decided_on_held_out_prompts(searched: Searched) -> None:
    """Defaults that are tied on tuning prompts run until one is significantly slower."""
    prompts = tuple(replace(one, name=f"{n}") for n in range(5) for one in searched.tuning.held_out.prompts)
    more = replace(searched, tuning=replace(searched.tuning, held_out=Workload("x", "evaluate", prompts)))
    tied = by_name(8.0, ar=10.0, tuned=4.0, chain=5.0, sage=5.0, finalist=4.0)

    def speed(name: str, prompt: WorkloadPrompt) -> float:
        return 6.0 if name == "sage" and prompt.settings.split == "evaluate" else tied(name, prompt)

    evidence = profile_of(more, GivenRaces(searched, speed)).evidence
    num_prompts = {one.name: one.num_prompts for one in evidence.compared}
    assert num_prompts == {**dict.fromkeys((AR, HF, "chain", TUNED), 20), "sage": 8}
    assert evidence.best_default == "chain"


def test_a_default_that_was_tuned_to_is_not_decoded_twice(searched: Searched) -> None:
    """It has the runs of the winner, and is the best default where no other one is faster."""
    defaults = published_defaults(searched.tuning.pool)
    races = GivenRaces(searched, by_name(8.0, ar=10.0, tuned=4.0, sage=5.0))
    finalists = measured(searched, races)
    winner = finalists.winner.model_copy(update={"configuration": defaults["chain"]})
    finalists = replace(finalists, winner=winner, best_defaults={name: defaults[name] for name in ("chain", "sage")})
    evaluation = evaluate_held_out(searched.tuning, PLAN, finalists, races)
    assert list(evaluation.runs) == [AR, HF, "chain", "sage", TUNED]
    assert evaluation.runs["chain"] == evaluation.runs[TUNED] and evaluation.best_default == "chain"


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
