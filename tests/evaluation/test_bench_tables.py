"""The tables of a bench against numbers by hand."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.documents.decoding_profile import AR, TUNED
from autotune.evaluation.bench_tables import arms_table, benchmark_results, gains_by_task, gains_table
from autotune.evaluation.summary import summarize
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.evaluation.sample_runs import run


def test_gains_by_task_by_hand() -> None:
    """Pooled within a task: (100 + 300) / (50 + 50); the last task's only answer has one token."""
    prompts = [WorkloadPrompt(task, Prompt(prompt=task, task=task), ()) for task in ("read", "add", "read", "say")]
    runs = {
        AR: [run(ms, tokens=11 if ms else 1, rounds=0) for ms in (100.0, 90.0, 300.0, 0.0)],
        TUNED: [run(ms, tokens=11 if ms else 1, rounds=4) for ms in (50.0, 45.0, 50.0, 0.0)],
    }
    assert [tuple(row.values()) for row in gains_by_task(runs, prompts)] == [
        (AR, "read", 2, 1.0, None),
        (TUNED, "read", 2, 4.0, 2.5),
        (AR, "add", 1, 1.0, None),
        (TUNED, "add", 1, 2.0, 2.5),
    ]


def test_benchmark_results_by_hand() -> None:
    """Two turns of one question, and a question of another task. Tokens per second are averaged over questions, prefill
    included.
    """
    first = WorkloadPrompt("q:1/turn-1", Prompt(prompt="a", task="chat"), ())
    second = WorkloadPrompt("q:1/turn-2", Prompt(turns=["a", "b"], task="chat"), ())
    prompts = [first, second, WorkloadPrompt("q:2", Prompt(prompt="c", task="qa"), ())]
    runs = {
        name: [run(ms, tokens=11, rounds=rounds, target_prefill_ms=100.0) for ms in times]
        for name, rounds, times in ((AR, 0, [900.0, 900.0, 1000.0]), (TUNED, 4, [400.0, 400.0, 900.0]))
    }
    found = benchmark_results(runs, prompts)
    assert [row["questions"] for row in found] == [1, 1, 1, 1, 2, 2]
    assert [row["mean_accepted_tokens"] for row in found] == [None, 2.5] * 3
    speeds = {AR: (22 / 2.0, 11 / 1.1), TUNED: (22 / 1.0, 11 / 1.0)}
    chat, qa = (speeds[TUNED][n] / speeds[AR][n] for n in range(2))
    overall = sum(speeds[TUNED]) / sum(speeds[AR])
    assert [row["speedup"] for row in found] == pytest.approx([1, chat, 1, qa, 1, overall])
    table = gains_table("mt-bench", found, "mean_accepted_tokens")
    assert table.columns == ["arm", "chat", "qa", "overall"] and table.emphasised == 1
    assert table.rows == [[AR, "1.00x", "1.00x", "1.00x"], [TUNED, "2.00x, 2.50", "1.10x, 2.50", "1.57x, 2.50"]]


def test_the_table_of_arms() -> None:
    baseline = [run(100.0, tokens=101, rounds=100), run(300.0, tokens=101, rounds=100)]
    tuned = summarize(TUNED, [run(ms, tokens=101, rounds=25) for ms in (50.0, 100.0)], baseline)
    table = arms_table([dataclasses.replace(tuned, name="hf", tokens_per_round=None), tuned])
    assert table.labels == {"hf": "Hugging Face's generate", "M": "mean number of tokens of a round"}
    assert table.rows[1] == [TUNED, "2.67x (2.00-3.00)", "4.00", "1333", "2/2"] and table.rows[0][2] == "-"
