"""Real runs: none is repeated and none is lost, arms take turns, and disturbed runs are measured again."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.documents.decoding_profile import AR
from autotune.evaluation.runner import MAX_REPEATS, SHAPE_TOKENS, ArmRunner
from autotune.modeling.graph_memory import graph_memory
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.evaluation.stub_arm import StubArm


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "runs.jsonl"


@pytest.fixture
def started(decoder: Decoder, processor: Any, ledger: Path) -> Callable[..., ArmRunner]:
    """Starts another runner with the same ledger."""
    return partial(ArmRunner, decoder, processor, ledger)


def texts(workload: Workload, *numbers: int) -> list[str]:
    return [workload.prompts[number].settings.text for number in numbers]


def test_known_runs_are_not_repeated(started: Callable[..., ArmRunner], evaluate: Workload, ledger: Path) -> None:
    arms = [StubArm(AR), StubArm("chain")]
    first = started(context="here").compare(arms, evaluate)
    assert all(arm.prompts == texts(evaluate, 0, 1, 2) for arm in arms)
    assert all(arm.warmed_up == texts(evaluate, 0, 1) for arm in arms), "the first prompts with an image and without"
    assert len(ledger.read_text().splitlines()) == 6
    again = [StubArm("other name", key="chain"), StubArm(AR)]
    found = started(context="here").compare(again, evaluate)
    assert found[AR] == first[AR] and found["other name"] == first["chain"], "an arm is known by its key"
    assert not again[0].prompts and not again[1].prompts
    # Models and devices are the context of the ledger's runs.
    elsewhere = [StubArm(AR), StubArm("chain")]
    started(context="elsewhere").compare(elsewhere, evaluate)
    assert all(arm.prompts for arm in elsewhere)
    started(context="elsewhere").compare(again, evaluate)
    assert not again[0].prompts and not again[1].prompts


def test_another_comparison_measures_all_its_arms(started: Callable[..., ArmRunner], evaluate: Workload) -> None:
    """An hour-old time of plain decoding is no baseline for an arm that decodes now."""
    started().compare([StubArm(AR), StubArm("chain")], evaluate)
    arms = [StubArm(AR), StubArm("sage")]
    started().compare(arms, evaluate)
    assert all(arm.prompts for arm in arms)


def test_repeats_of_a_comparison_are_measured_again(started: Callable[..., ArmRunner], evaluate: Workload) -> None:
    times = itertools.count(1)

    def set_time(stats: DecodingStats, settings: Prompt) -> None:
        stats.decode_ms = float(next(times))

    runner = started()
    first, second = (runner.compare([StubArm(AR, set_time)], evaluate, repeat=repeat) for repeat in (0, 1))
    assert first != second
    assert started().compare([StubArm(AR)], evaluate, repeat=1) == second


def test_all_arms_of_an_interrupted_prompt_are_measured_again(
    started: Callable[..., ArmRunner], evaluate: Workload, ledger: Path
) -> None:
    started().compare([StubArm(AR), StubArm("chain")], evaluate)
    lines = ledger.read_text().splitlines()
    ledger.write_text("".join(f"{line}\n" for line in lines[:3]))  # a whole prompt and one arm of the next
    arms = [StubArm(AR), StubArm("chain")]
    started().compare(arms, evaluate)
    assert all(arm.prompts == texts(evaluate, 1, 2) for arm in arms)


def test_a_torn_ledger_loses_the_torn_line(started: Callable[..., ArmRunner], evaluate: Workload, ledger: Path) -> None:
    """A crash in the middle of a line, a line of another version, and one that is no JSON."""
    first = started().compare([StubArm(AR)], evaluate)
    lines = ledger.read_text().splitlines()
    other_version = json.dumps({**json.loads(lines[1]), "temperature_of_the_room": 21})
    ledger.write_text("\n".join([lines[0], other_version, "not JSON", lines[2][: len(lines[2]) // 2]]))
    arm = StubArm(AR)
    again = started().compare([arm], evaluate)
    assert arm.prompts == texts(evaluate, 1, 2) and again[AR][0] == first[AR][0]
    unused = StubArm(AR)
    assert started().compare([unused], evaluate) == again
    assert not unused.prompts, "the new lines were not appended to the torn one"


def test_an_arm_is_warmed_up_for_every_shape(runner: ArmRunner, evaluate: Workload, processor: Any) -> None:
    """Prompts of up to 64 tokens have one shape, those of up to 128, 256, ... and those with an image others, so that
    images of many sizes warm up a few times. Progress is reported before the first warm-up.
    """

    def prompt(name: str, num_words: int, pixels: tuple[Any, ...] = ()) -> WorkloadPrompt:
        return WorkloadPrompt(name, Prompt(prompt=f"{name}{' a' * num_words}", max_new_tokens=2), pixels)

    image = evaluate.prompts[1].pixels
    prompts = [prompt("s", 1), prompt("t", 2), prompt("long", 40), prompt("seen", 1, image)]
    prompts += [prompt("as long", 41), prompt("s", 2, image), prompt("longer", 100), prompt("longer too", 70)]
    lengths = [p.inputs(processor)["input_ids"].shape[1] for p in prompts]
    assert max(lengths[0], lengths[1], lengths[5]) <= SHAPE_TOKENS < lengths[2]
    assert 2 * SHAPE_TOKENS < lengths[7] <= lengths[6] - 30 < 4 * SHAPE_TOKENS
    arms, reported = [StubArm(AR), StubArm("hf")], list[tuple[int, int, int]]()
    workload = Workload("shapes", "evaluate", tuple(prompts))
    runner.compare(arms, workload, report=lambda *count: reported.append((*count, len(arms[0].warmed_up))))
    assert reported[0] == (0, 8, 0) and reported[-1][:2] == (8, 8)
    for arm in arms:
        assert [text.split(" a")[0] for text in arm.prompts] == [
            "s",
            "t",
            "long",
            "seen",
            "as long",
            "s",
            "longer",
            "longer too",
        ]
        assert [text.split(" a")[0] for text in arm.warmed_up] == ["s", "long", "seen", "longer"]


def test_arms_take_turns_in_a_random_order_that_the_seed_repeats(runner: ArmRunner, evaluate: Workload) -> None:
    """Prompt by prompt, every arm once: a machine that slows down slows all of them."""
    prompts = Workload("many", "evaluate", evaluate.prompts * 4)
    turns: list[list[tuple[str, str]]] = []
    for seed in (0, 0, 1):
        turns.append([])
        arms: list[StubArm] = []
        for name in "abcdef":
            arms.append(StubArm(name, lambda _, settings, n=name: turns[-1].append((n, settings.text))))
        runner.compare([*arms, arms[0]], prompts, seed=seed)
        assert all(len(arm.prompts) == len(prompts.prompts) for arm in arms), "an arm that is named twice runs once"
    assert turns[0] == turns[1] != turns[2]
    per_prompt = [turns[0][begin : begin + 6] for begin in range(0, len(turns[0]), 6)]
    assert [{text for _, text in turn} for turn in per_prompt] == [{p.settings.text} for p in prompts.prompts]
    assert all({name for name, _ in turn} == set("abcdef") for turn in per_prompt)
    assert len({tuple(name for name, _ in turn) for turn in per_prompt}) > 4


def test_a_prompt_that_would_end_too_late_is_not_begun(
    runner: ArmRunner, evaluate: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the first one of a later comparison: runs of its arms, each by itself, took two seconds and three."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("autotune.evaluation.runner.time", clock)

    def takes(seconds: float) -> Callable[[DecodingStats, Prompt], None]:
        return lambda *_: setattr(clock, "now", clock.now + seconds)

    arms = [StubArm(AR, takes(2.0)), StubArm("chain", takes(3.0))]
    runs = runner.compare(arms, evaluate, deadline=14.9, min_prompts=0)
    assert len(runs[AR]) == 2 < len(evaluate.prompts) and clock.now == 10.0
    assert runner.prompt_s(arms) == 5.0 and runner.prompt_s([*arms, StubArm("sage")]) == 7.5
    later = {"deadline": 12.5, "min_prompts": 0, "repeat": 1}
    assert runner.compare(arms, evaluate, **later) == {AR: [], "chain": []}
    assert len(runner.compare(arms[:1], evaluate, **later)[AR]) == 1, "without the slow arm there is time"
    for limit, count in ((0.0, 2), (1e9, 3)):
        runner.limit = limit
        assert len(runner.compare(arms, evaluate, deadline=0.0, min_prompts=3, repeat=count)[AR]) == count


def test_past_the_deadline_it_ends_with_whole_prompts(runner: ArmRunner, evaluate: Workload) -> None:
    """After at least ``min_prompts``, each with all arms."""
    reported: list[tuple[int, int]] = []
    runs = runner.compare(
        [StubArm(AR), StubArm("chain")],
        evaluate,
        deadline=time.monotonic() - 1,
        min_prompts=2,
        report=lambda *args: reported.append(args),
    )
    assert [len(found) for found in runs.values()] == [2, 2] and reported == [(0, 3), (1, 3), (2, 3)]


def test_a_disturbed_run_is_measured_again(started: Callable[..., ArmRunner], evaluate: Workload, ledger: Path) -> None:
    """Its prefill took much longer than that of the other arms, so the machine was busy. Decoding times play no
    part.
    """
    left = [1000.0, 1000.0]  # of the chain on the third prompt

    def disturb(stats: DecodingStats, settings: Prompt) -> None:
        if settings.text == evaluate.prompts[2].settings.text and left:
            stats.target_prefill_ms = left.pop()

    def decode_slowly(stats: DecodingStats, settings: Prompt) -> None:
        stats.decode_ms = 1e6

    arms = [StubArm(AR), StubArm("chain", disturb), StubArm("sage", decode_slowly)]
    runner = started()
    runs = runner.compare(arms, evaluate)
    assert runner.num_repeated == 2 and not left
    assert all(run.target_prefill_ms == 10.0 for arm_runs in runs.values() for run in arm_runs)
    assert all(run.decode_ms == 1e6 for run in runs["sage"])
    # The last run in the ledger counts.
    assert started().compare(arms, evaluate) == runs


def test_a_run_in_which_something_was_captured_is_measured_again(runner: ArmRunner, evaluate: Workload) -> None:
    """A few times: one that captures every time is kept, with the number."""
    memory, left = graph_memory(runner.decoder.target.device), [1]

    def capture(stats: DecodingStats, settings: Prompt, left: list[int] | None = None) -> None:
        memory.num_kept += 1 if left is None else left.pop() if left else 0

    runs = runner.compare([StubArm("once", partial(capture, left=left)), StubArm("always", capture)], evaluate)
    assert [[run.captures for run in of_arm] for of_arm in runs.values()] == [[0, 0, 0], [1, 1, 1]]
    assert runner.num_repeated == 1 + 3 * MAX_REPEATS


def test_a_run_during_which_the_machine_stalled_is_measured_again(runner: ArmRunner, evaluate: Workload) -> None:
    """Its mean forward took longer than that of the largest tree, which may take five times the shortest."""
    stalls = [1000.0]

    def stall(stats: DecodingStats, settings: Prompt) -> None:
        if settings.text == evaluate.prompts[1].settings.text and stalls:
            stats.verify_ms = stalls.pop()

    def verify_large_trees(stats: DecodingStats, settings: Prompt) -> None:
        stats.verify_ms = 100.0

    runs = runner.compare([StubArm(AR, stall), StubArm("chain", verify_large_trees)], evaluate)
    assert runner.num_repeated == 1
    assert {run.forward_ms for run in runs[AR]} == {10.0} and {run.forward_ms for run in runs["chain"]} == {50.0}
