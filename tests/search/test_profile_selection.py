"""Finalists, operating points and the measured profile, with given times in place of the clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR, OperatingPoint
from autotune.evaluation.arms import Arm
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runs import Run
from autotune.search.evaluator import Candidate, Evaluator
from autotune.search.model_pool import ModelPool
from autotune.search.pipeline import bounds_of
from autotune.search.profile_selection import NUM_DEFAULTS_PROMPTS, POINT_PROMPTS, ProfileSelection, configuration_of
from autotune.search.space import SearchSpace
from autotune.search.traces import record_traces
from autotune.search.tree_search import search_trees
from autotune.study.ledger import Ledger
from autotune.workloads.workload import Workload, WorkloadPrompt, load_workload
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
        model_pool, model_pool.subnets(SPACE), workloads[0], folder, Console(), bounds=bounds_of(SPACE)
    )
    evaluator = Evaluator(traces, table)
    found = search_trees(evaluator, SPACE, Ledger(folder / "ledger.sqlite"), num_trials=0, documents="x")
    deadline = time.monotonic() + 3600
    return ProfileSelection(found, model_pool, evaluator, folder, *workloads, 0, deadline, Console())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Speed], None]:
    """Sets the decoding time of every arm and prompt."""

    def set_speed(speed: Speed) -> None:
        def compare(self: ArmRunner, arms: Sequence[Arm], workload: Workload, **_: Any) -> dict[str, list[Run]]:
            return {
                arm.name: [run(TOKENS * speed(arm, prompt), tokens=TOKENS) for prompt in workload.prompts]
                for arm in arms
            }

        monkeypatch.setattr(ArmRunner, "compare", compare)

    return set_speed


def finalists_of(selection: ProfileSelection) -> list[Candidate]:
    return [selection.evaluator.with_fallback(one) for one in selection.trees.fastest[:4]]


def test_fastest_finalist_in_real_runs_wins(selection: ProfileSelection, clock: Callable[[Speed], None]) -> None:
    """The stored prediction is for the prompts that were run."""
    finalists = finalists_of(selection)
    clock(lambda arm, prompt: {AR: 10.0, "finalist 3": 5.0}.get(arm.name, 6.0))
    assert selection.measure_finalists(finalists) is finalists[2]
    assert [one.configuration.label for one in selection.finalists] == [one.configuration.label for one in finalists]
    assert any(not one.is_eliminated for one in selection.finalists)
    assert [one.speedup for one in selection.finalists] == pytest.approx([10 / 6, 10 / 6, 2.0, 10 / 6])
    for one, candidate in zip(selection.finalists, finalists, strict=True):
        replayed_ms = selection.evaluator.replay(candidate.configuration).decode_ms
        ran = slice(8)  # one round of prompts sufficed
        assert one.predicted_speedup == pytest.approx(selection.evaluator.ar_ms[ran].sum() / replayed_ms[ran].sum())


def test_ties_go_to_the_smaller_tree(selection: ProfileSelection, clock: Callable[[Speed], None]) -> None:
    finalists = finalists_of(selection)
    clock(lambda arm, prompt: 10.0 if arm.name == AR else 5.0)
    smallest = min(one.nodes_per_round for one in finalists)
    assert selection.measure_finalists(finalists).nodes_per_round == smallest
    assert max(one.nodes_per_round for one in finalists) > smallest


def test_operating_point_must_be_faster_in_real_runs(
    selection: ProfileSelection, clock: Callable[[Speed], None], capsys: pytest.CaptureFixture[str]
) -> None:
    winner, other = finalists_of(selection)[:2]
    points = [(selection.points(winner)[-1][0].model_copy(update={"workload": "read"}), other)]
    points += selection.points(winner)[-1:]
    clock(lambda arm, prompt: {"winner": 5.0, "point": 4.99}.get(arm.name, 10.0))
    assert [when.label for when, _ in selection.confirmed(points, winner)] == ["any request"]
    clock(lambda arm, prompt: {"winner": 5.0, "point": 4.0}.get(arm.name, 10.0))
    kept = selection.confirmed(points, winner)
    printed = capsys.readouterr().err
    assert re.search(rf"1 +0\.80 +{POINT_PROMPTS} +yes", printed), "a significant difference ends the runs"
    assert "workload read: " in printed and max(map(len, printed.splitlines())) <= 120
    assert [when.workload for when, _ in kept] == ["read", None] and kept[0][1].key == other.key


def test_temperature_may_get_an_operating_point(selection: ProfileSelection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner takes twice as long whenever tokens are sampled."""
    winner, other = finalists_of(selection)[0], selection.trees.fastest[1]
    sampled = np.array([prompt.settings.temperature == 1.0 for prompt in selection.tune.prompts])

    def prompt_ms(self: Evaluator, configurations: Sequence[Configuration]) -> np.ndarray:
        fast = {winner.key: ~sampled, other.key: sampled}
        return np.array([np.where(fast.get(one.key, np.zeros(16, bool)), 1.0, 2.0) for one in configurations])

    monkeypatch.setattr(Evaluator, "prompt_ms", prompt_ms)
    points = selection.points(winner)
    assert [when.label for when, _ in points] == ["temperature from 0.5", "any request"]


def test_profile_has_the_measurements(selection: ProfileSelection, clock: Callable[[Speed], None]) -> None:
    clock(lambda arm, prompt: {AR: 10.0, "tuned": 4.0}.get(arm.name, 5.0))
    document = selection.measured_profile()
    (point,) = document.points
    assert point.measured is not None and point.measured.speedup == pytest.approx(2.5)
    assert point.measured.num_prompts == 4 and point.measured.identical_outputs == 4
    compared = {one.name: one for one in document.evidence.compared}
    assert compared["tuned"].speedup == pytest.approx(2.5) and compared["chain"].speedup == pytest.approx(2.0)
    assert document.evidence.configurations_replayed == selection.trees.num_replayed == 2 * (4 + 1)
    assert len(document.evidence.prompts) == 4
    configuration = configuration_of(point)
    assert configuration is not None
    assert configuration.key in {selection.evaluator.with_fallback(one).key for one in selection.trees.fastest}


def test_only_the_fastest_default_decodes_all_prompts(
    selection: ProfileSelection, clock: Callable[[Speed], None]
) -> None:
    """All published defaults decode the first prompts; the fastest of them and the profile decode all prompts."""
    prompts = tuple(replace(prompt, name=f"{n}") for n in range(5) for prompt in selection.evaluate.prompts)
    more = replace(selection, evaluate=Workload("x", "evaluate", prompts))
    clock(lambda arm, prompt: {AR: 10.0, "tuned": 4.0, "dream": 4.5}.get(arm.name, 5.0))
    document = more.measured_profile()
    compared = {one.name: one for one in document.evidence.compared}
    assert {name: one.num_prompts for name, one in compared.items()} == {
        **dict.fromkeys(compared, NUM_DEFAULTS_PROMPTS),
        **dict.fromkeys((AR, "tuned", "dream"), 20),
    }
    assert compared["dream"].speedup == pytest.approx(10 / 4.5) and compared["sage"].speedup == pytest.approx(2.0)
    assert len(document.evidence.prompts) == 20


def test_profile_decodes_plainly_if_the_draft_is_slower_on_held_out_prompts(
    selection: ProfileSelection, clock: Callable[[Speed], None]
) -> None:
    """The measurements of the draft remain in the evidence."""
    clock(lambda arm, prompt: {AR: 10.0, "tuned": 11.0}.get(arm.name, 5.0))
    document = selection.measured_profile()
    (point,) = document.points
    assert point.draft is None and point.tree is None and configuration_of(point) is None
    assert point.measured is not None and point.measured.speedup == 1.0
    assert {one.name: one.speedup for one in document.evidence.compared}["tuned"] == pytest.approx(10 / 11)
    assert {(one.decode_ms, one.ar_decode_ms) for one in document.evidence.prompts} == {
        (10.0 * TOKENS, 10.0 * TOKENS)
    }, "a check compares with plain decoding"


def test_profile_for_another_device_has_predictions_only(selection: ProfileSelection) -> None:
    points: list[OperatingPoint] = selection.predicted_profile().points
    fastest = selection.trees.fastest[0]
    assert all(point.measured is None for point in points)
    if fastest.speedup >= 1.0:
        assert points[-1].predicted is not None and points[-1].tree is not None
        assert points[-1].predicted.speedup == selection.evaluator.with_fallback(fastest).speedup
    else:
        assert [point.tree for point in points] == [None]
