"""The tables of a bench against numbers by hand."""

from __future__ import annotations

import dataclasses

import pytest
from pandas import DataFrame

from autotune.console import Console
from autotune.documents.decoding_profile import AR, TUNED
from autotune.evaluation.bench import BenchResults
from autotune.evaluation.bench_tables import (
    benchmark_results,
    gain_by_length,
    geomeans,
    print_arms,
    print_benchmark,
    print_lengths,
    print_tasks,
    speedups_by_task,
)
from autotune.evaluation.summary import summarize
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.evaluation.sample_runs import run


def test_speedups_by_task_by_hand() -> None:
    """Pooled within a task: (100 + 300) / (50 + 50); the last task's only answer has one token."""
    tasks = ["read", "add", "read", "say"]
    runs = {
        name: [run(ms, tokens=11 if ms else 1, task=task) for ms, task in zip(times, tasks, strict=True)]
        for name, times in {AR: [100.0, 90.0, 300.0, 0.0], TUNED: [50.0, 45.0, 50.0, 0.0]}.items()
    }
    found = speedups_by_task(runs)
    assert list(found.index) == [AR, TUNED] and list(found.columns) == ["read", "add", "say"]
    assert found.loc[AR, ["read", "add"]].tolist() == [1.0, 1.0]
    assert found.loc[TUNED, ["read", "add"]].tolist() == [4.0, 2.0] and found["say"].isna().all()
    assert geomeans(found)[TUNED] == pytest.approx(8**0.5)


def test_benchmark_results_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Two turns of one question, and a question of another task. Tokens per second are averaged over questions, prefill
    included.
    """
    first = WorkloadPrompt("q:1/turn-1", Prompt(prompt="a", task="chat"), ())
    second = WorkloadPrompt("q:1/turn-2", Prompt(turns=["a", "b"], task="chat"), ())
    prompts = [first, second, WorkloadPrompt("q:2", Prompt(prompt="c", task="qa"), ())]
    tasks = [prompt.settings.task for prompt in prompts]
    runs = {
        name: [
            run(ms, tokens=11, rounds=rounds, task=task, target_prefill_ms=100.0)
            for ms, task in zip(times, tasks, strict=True)
        ]
        for name, rounds, times in ((AR, 0, [900.0, 900.0, 1000.0]), (TUNED, 4, [400.0, 400.0, 900.0]))
    }
    found = benchmark_results(runs, prompts).set_index(["arm", "task"])
    assert found.questions.tolist() == [1, 1, 1, 1, 2, 2]
    assert found.mean_accepted_tokens[TUNED].tolist() == [2.5, 2.5, 2.5] and found.mean_accepted_tokens[AR].isna().all()
    speeds = {AR: (22 / 2.0, 11 / 1.1), TUNED: (22 / 1.0, 11 / 1.0)}
    expected = [
        speeds[TUNED][0] / speeds[AR][0],
        speeds[TUNED][1] / speeds[AR][1],
        sum(speeds[TUNED]) / sum(speeds[AR]),
    ]
    assert found.speedup[TUNED].tolist() == pytest.approx(expected) and (found.speedup[AR] == 1).all()
    print_benchmark("mt-bench", found.reset_index(), Console())
    printed = capsys.readouterr().err
    assert (
        "mt-bench: speedup over ar, prefill included, and mean accepted tokens" in printed and "2.00x, 2.50" in printed
    )


def test_tasks_are_those_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    """Engines do not repeat the task of a request."""
    prompts = tuple(WorkloadPrompt(task, Prompt(prompt=task, task=task), ()) for task in ("chat", "qa"))
    runs = {AR: [run(200.0)] * 2, TUNED: [run(100.0)] * 2}
    results = BenchResults(runs, Workload("q", "evaluate", prompts, format="mt-bench"), seed=0)
    results.print(Console())
    found = results.to_json()
    assert found["speedup_by_task"][TUNED] == {"chat": 2.0, "qa": 2.0}
    assert [row["task"] for row in found["benchmark_results"]] == ["chat", "chat", "qa", "qa", "overall", "overall"]


def test_gain_by_answer_length_by_hand() -> None:
    """Two answers of 17 to 32 tokens: (60 + 60) / (20 + 40); one of up to 16; one without decoding."""
    tokens = [21, 11, 31, 1]
    runs = {
        AR: [run(ms, tokens=n, rounds=n - 1) for ms, n in zip([60.0, 30.0, 60.0, 0.0], tokens, strict=True)],
        TUNED: [run(ms, tokens=n, rounds=5) for ms, n in zip([20.0, 30.0, 40.0, 0.0], tokens, strict=True)],
    }
    found = gain_by_length(runs).set_index(["arm", "length"])
    assert found.loc[(TUNED, "17-32")].tolist() == pytest.approx([2, 2.0, (20 + 30) / 10])
    assert found.loc[(TUNED, "1-16")].tolist() == pytest.approx([1, 1.0, 2.0])
    assert found.loc[(AR, "17-32")].tolist() == pytest.approx([2, 1.0, 1.0])
    assert len(found) == 4


def test_gain_by_length_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {AR: [run(9.0), run(9.0, tokens=40)], TUNED: [run(3.0), run(9.0, tokens=40)]}
    print_lengths(gain_by_length(runs), Console())
    shown = capsys.readouterr().err
    assert "33-64" in shown and "3.00x, M 2.00" in shown and "1.00x, M 7.80" in shown
    print_lengths(gain_by_length({AR: [run(9.0)]}), Console())
    assert capsys.readouterr().err == "", "one length says nothing"


def test_the_tables_show_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    baseline = [run(100.0, tokens=101, rounds=100), run(300.0, tokens=101, rounds=100)]
    runs = [run(ms, tokens=101, rounds=25) for ms in (50.0, 100.0)]
    console = Console()
    tuned = summarize(TUNED, runs, baseline)
    unmeasured = dataclasses.replace(tuned, name="hf", tokens_per_round=None)
    print_arms([unmeasured, tuned], console)
    printed = capsys.readouterr().err
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert "hf: Hugging Face's generate\nM: mean number of tokens of a round\n" in printed and "ar: " not in printed
    expected = ["2.67x", "(2.00-3.00)", "4.00", "1333", "2/2"]
    assert rows[TUNED] == expected
    assert rows["hf"] == [*expected[:2], "-", *expected[3:]]

    print_tasks(DataFrame({"read": {AR: 1.0, TUNED: 2.0}, "say": {AR: 1.0, TUNED: float("nan")}}), console)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().err.splitlines() if line.strip()}
    assert rows["arm"] == ["read", "say", "geomean"] and rows[TUNED] == ["2.00x", "-", "2.00x"]
