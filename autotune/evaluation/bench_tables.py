"""Tables of ``autotune bench``: what the runs of several arms add up to."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, ARM_NOTES, TUNED
from autotune.evaluation.summary import Summary, decoded_pairs, speedup
from autotune.table import Table, number, percent, times, with_interval
from autotune.workloads.prompt import WorkloadPrompt

ARM_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "speedup": lambda s: with_interval(s.speedup, s.ci95),
    "M": lambda s: number(s.tokens_per_round),
    "tokens/s": lambda s: f"{s.tokens_per_second:.0f}",
    "same output": lambda s: f"{s.identical_outputs}/{s.num_prompts}",
    "perplexity": lambda s: number(s.perplexity, 3),
    "agreement": lambda s: percent(s.agreement),
}
QUALITY = ("perplexity", "agreement")  # columns of comparisons with lossy arms
OVERALL = "overall"


def gains_by_task(runs: Mapping[str, Sequence[Decoded]], prompts: Sequence[WorkloadPrompt]) -> list[dict[str, Any]]:
    """Speedup over ``ar`` and tokens per round of each arm in each task.

    Times and tokens are summed over prompts before they are divided; prompts in which nothing was decoded do not count.
    Tasks are those of the prompts: not every arm repeats them.

    Returns:
        Rows ``arm``, ``task``, ``prompts``, ``speedup``, ``tokens_per_round``, which is None without rounds.
    """
    tasks = [prompt.settings.task for prompt in prompts]
    rows = []
    for task in dict.fromkeys(tasks):
        is_of_task = [other == task for other in tasks]
        plain = list(itertools.compress(runs[AR], is_of_task))
        for arm, of_arm in runs.items():
            chosen = list(itertools.compress(of_arm, is_of_task))
            tokens, rounds = decoded_pairs(chosen, plain)[1], sum(run.rounds for run in chosen)
            if tokens.size:
                rows.append(
                    {
                        "arm": arm,
                        "task": task,
                        "prompts": len(tokens),
                        "speedup": speedup(chosen, plain),
                        "tokens_per_round": tokens.sum() / rounds if rounds else None,
                    }
                )
    return rows


def benchmark_results(runs: Mapping[str, Sequence[Decoded]], prompts: Sequence[WorkloadPrompt]) -> list[dict[str, Any]]:
    """Mean accepted tokens and speedup over ``ar`` by task and overall, as Spec-Bench and MMSpec report them.

    Mean accepted tokens are the tokens per round of all rounds, including the target's own token; None for an arm
    without rounds. The speedup is the ratio of mean tokens per second over questions. The turns of a question are added
    up, and its time is wall time: the prefills count, unlike in the other tables. ``prompts`` are those of the runs, in
    their order.

    Returns:
        Rows ``arm``, ``task``, ``questions``, ``mean_accepted_tokens``, ``speedup``.
    """
    questions = list(itertools.accumulate(prompt.earlier is None for prompt in prompts))
    tasks = [prompt.settings.task for prompt in prompts]
    rows = []
    for task in (*dict.fromkeys(tasks), OVERALL):
        plain_speed = 0.0
        for arm, of_arm in runs.items():
            turns = [
                (question, run)
                for question, task_of_run, run in zip(questions, tasks, of_arm, strict=True)
                if task in (task_of_run, OVERALL)
            ]
            seconds, tokens = defaultdict[int, float](float), Counter[int]()
            for question, run in turns:
                seconds[question] += (run.target_prefill_ms + run.decode_ms) / 1e3
                tokens[question] += run.new_tokens
            speed = fmean(tokens[question] / seconds[question] for question in seconds)
            plain_speed = plain_speed or speed  # plain decoding is the first arm
            rounds = sum(run.rounds for _, run in turns)
            rows.append(
                {
                    "arm": arm,
                    "task": task,
                    "questions": len(seconds),
                    "mean_accepted_tokens": sum(run.new_tokens - 1 for _, run in turns) / rounds if rounds else None,
                    "speedup": speed / plain_speed,
                }
            )
    return rows


def arms_table(summaries: Sequence[Summary]) -> Table:
    """A row for each arm."""
    first = summaries[0]
    columns = {name: cell for name, cell in ARM_COLUMNS.items() if name not in QUALITY or first.perplexity is not None}
    arms = [summary.name for summary in summaries]
    return Table(
        f"Decoding {first.num_prompts} prompts, {first.num_tokens} tokens; speedup over ar with its 95 % interval",
        ["arm", *columns],
        [[summary.name, *(cell(summary) for cell in columns.values())] for summary in summaries],
        emphasised=arms.index(TUNED) if TUNED in arms else None,
        labels={name: note for name, note in ARM_NOTES.items() if name in (*columns, *arms)},
    )


def gains_table(title: str, rows: Sequence[dict[str, Any]], tokens: str) -> Table:
    """A row for each arm, and a column for each task: the speedup and, where there are rounds, tokens."""
    cells = {
        (row["arm"], row["task"]): times(row["speedup"]) + (f", {row[tokens]:.2f}" if row[tokens] else "")
        for row in rows
    }
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    return Table(
        title,
        ["arm", *tasks],
        [[arm, *(cells.get((arm, task), "-") for task in tasks)] for arm in arms],
        emphasised=arms.index(TUNED) if TUNED in arms else None,
    )
