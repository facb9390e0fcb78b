"""Tables of ``autotune bench``: what the runs of several arms add up to, and how it is printed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from autotune.console import Console
from autotune.documents.decoded import Decoded, runs_dataframe
from autotune.documents.decoding_profile import AR, HF, TUNED
from autotune.documents.published_defaults import NAMED
from autotune.evaluation.summary import Summary
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.workloads.prompt import WorkloadPrompt

if TYPE_CHECKING:
    from pandas import DataFrame, Series


def _pooled(runs: dict[str, list[Decoded]], by: str) -> DataFrame:
    """Prompts, speedup over ``ar`` and tokens per round by arm and by ``task``, or by the ``length`` of ar's answer.

    Times and tokens are summed over prompts before they are divided; prompts in which nothing was decoded do not count.
    Tokens per round are NaN where an arm has no rounds.
    """
    frame = runs_dataframe(runs).assign(steps=lambda found: found.new_tokens - 1)
    plain = frame[frame.arm == AR].set_index("number")[["decode_ms", "steps", "length"]]
    pairs = frame.drop(columns="length").join(plain, on="number", rsuffix="_ar")
    groups = pairs[(pairs.steps > 0) & (pairs.steps_ar > 0)].groupby(["arm", by])
    sums = groups[["decode_ms", "steps", "decode_ms_ar", "steps_ar", "rounds"]].sum()
    sums["speedup"] = (sums.decode_ms_ar / sums.steps_ar) / (sums.decode_ms / sums.steps)
    sums["tokens_per_round"] = sums.steps / sums.rounds.where(sums.rounds > 0)
    return sums.assign(prompts=groups.size())[["prompts", "speedup", "tokens_per_round"]]


def speedups_by_task(runs: dict[str, list[Decoded]]) -> DataFrame:
    """Pooled speedup over ``ar``: a row for each arm, a column for each task; NaN for a task in which nothing was
    decoded.
    """
    tasks = list(dict.fromkeys(run.task for of_arm in runs.values() for run in of_arm))
    return _pooled(runs, "task").speedup.unstack("task").reindex(index=list(runs), columns=tasks)


def geomeans(by_task: DataFrame) -> Series[float]:
    """Geometric mean over tasks, by arm: every task has the same weight, however many tokens it has."""
    return np.exp(np.log(by_task).mean(axis=1))


ARM_NOTES = {AR: "plain decoding", HF: "Hugging Face's generate", "M": "mean number of tokens of a round"}
"""Explanations below tables of arms."""
ARM_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "speedup": lambda s: f"{s.speedup:.2f}x ({s.ci95[0]:.2f}-{s.ci95[1]:.2f})",
    "M": lambda s: f"{s.tokens_per_round:.2f}" if s.tokens_per_round else "-",
    "tokens/s": lambda s: f"{s.tokens_per_second:.0f}",
    "same output": lambda s: f"{s.identical_outputs}/{s.num_prompts}",
    "perplexity": lambda s: "-" if s.perplexity is None else f"{s.perplexity:.3f}",
    "agreement": lambda s: "-" if s.agreement is None else f"{100 * s.agreement:.1f} %",
}
QUALITY = ("perplexity", "agreement")  # columns of comparisons with lossy arms


def print_arms(summaries: Sequence[Summary], console: Console) -> None:
    """Print a row for each arm."""
    first = summaries[0]
    columns = {name: cell for name, cell in ARM_COLUMNS.items() if name not in QUALITY or first.perplexity is not None}
    rows = [[s.name, *(cell(s) for cell in columns.values())] for s in summaries]
    title = f"Decoding {first.num_prompts} prompts, {first.num_tokens} tokens; speedup over ar with its 95 % interval"
    _print_arm_table(title, columns, rows, console)
    console.labels({name: note for name, note in ARM_NOTES.items() if name in (*columns, *(s.name for s in summaries))})


def is_lossy_arm(name: str) -> bool:
    """Whether the arm's output is not the target's own."""
    return name in NAMED and not NAMED[name].verification.is_lossless


def print_tasks(by_task: DataFrame, console: Console) -> None:
    """Print a row for each arm with a column for each task, and the geometric mean over tasks."""
    table = by_task.assign(geomean=geomeans(by_task)).map(lambda value: "-" if np.isnan(value) else f"{value:.2f}x")
    rows = [[str(name), *row] for name, *row in table.itertuples()]
    _print_arm_table("Speedup over ar by task", table.columns, rows, console)


OVERALL = "overall"


def benchmark_results(runs: dict[str, list[Decoded]], prompts: Sequence[WorkloadPrompt]) -> DataFrame:
    """Mean accepted tokens and speedup over ``ar`` by task and overall, as Spec-Bench and MMSpec report them.

    Mean accepted tokens are the tokens per round of all rounds, including the target's own token; NaN for an arm
    without rounds. The speedup is the ratio of mean tokens per second over questions. The turns of a question are added
    up, and its time is wall time: the prefills count, unlike in the other tables. ``prompts`` are those of the runs, in
    their order.

    Columns: arm, task, questions, mean_accepted_tokens, speedup.
    """
    import pandas as pd

    question = list(itertools.accumulate(prompt.earlier is None for prompt in prompts))
    rows = [
        (name, run.task, number, run.new_tokens, run.rounds, (run.target_prefill_ms + run.decode_ms) / 1e3)
        for name, arm_runs in runs.items()
        for number, run in zip(question, arm_runs, strict=False)
    ]
    turns = pd.DataFrame(rows, columns=["arm", "task", "question", "tokens", "rounds", "seconds"])
    turns["decoded"] = turns.tokens - 1  # a prefill emits the first token
    records = []
    for task in (*dict.fromkeys(turns.task), OVERALL):
        of_task = turns if task == OVERALL else turns[turns.task == task]
        questions = of_task.groupby(["arm", "question"])[["tokens", "seconds"]].sum()
        speeds = (questions.tokens / questions.seconds).groupby("arm").mean()
        sums = of_task.groupby("arm")[["decoded", "rounds"]].sum()
        for name in runs:
            accepted = sums.decoded[name] / sums.rounds[name] if sums.rounds[name] else float("nan")
            records.append((name, task, len(questions.loc[name]), accepted, speeds[name] / speeds[AR]))
    return pd.DataFrame(records, columns=["arm", "task", "questions", "mean_accepted_tokens", "speedup"])


def print_benchmark(name: str, results: DataFrame, console: Console) -> None:
    """Print a row for each arm of a benchmark, with a column for each task."""
    title = f"{name}: speedup over ar, prefill included, and mean accepted tokens"
    _print_figures(title, results, "task", "mean_accepted_tokens", "", console)


def gain_by_length(runs: dict[str, list[Decoded]]) -> DataFrame:
    """Speedup over ``ar`` and tokens per round by the length of the answer of ``ar`` (SAGE, figure 3).

    Columns: arm, length, prompts, speedup, tokens_per_round; NaN where an arm has no rounds.
    """
    rank = {name: number for number, name in enumerate(runs)}
    found = _pooled(runs, "length").reset_index()
    found["first"] = found.length.str.split("-").str[0].astype(int)
    found = found.sort_values(["arm", "first"], key=lambda values: values.map(rank) if values.name == "arm" else values)
    return found.drop(columns="first").reset_index(drop=True)


def print_lengths(by_length: DataFrame, console: Console) -> None:
    """Print speedup and M of each arm by the length of the answer, if the answers are of several lengths."""
    if by_length.length.nunique() > 1:
        title = "Speedup over ar and M by the number of tokens of ar's answer"
        _print_figures(title, by_length, "length", "tokens_per_round", "M ", console)


def pool_counts(runs: Sequence[Decoded]) -> AcceptanceCounts:
    """Acceptance counts, summed over runs."""
    counts = AcceptanceCounts()
    for run in runs:
        counts.add(AcceptanceCounts.from_json(run.acceptance_counts))
    return counts


def _print_figures(title: str, table: DataFrame, column: str, tokens: str, mark: str, console: Console) -> None:
    """Print a row for each arm and a column for each value of ``column``: the speedup and, where there are rounds,
    ``mark`` and the value of ``tokens``.
    """
    figures = zip(table.speedup.to_numpy(float), table[tokens].to_numpy(float), strict=True)
    texts = [f"{gain:.2f}x" + ("" if np.isnan(value) else f", {mark}{value:.2f}") for gain, value in figures]
    cells = dict(zip(zip(table.arm, table[column], strict=True), texts, strict=True))
    columns = list(table[column].unique())
    rows = [[arm, *(cells.get((arm, name), "-") for name in columns)] for arm in table.arm.unique()]
    _print_arm_table(title, columns, rows, console)


def _print_arm_table(title: str, columns: Iterable[str], rows: list[list[str]], console: Console) -> None:
    """Print a table whose rows begin with the names of arms; the profile's row is emphasised."""
    names = [name for name, *_ in rows]
    console.table(title, ["arm", *columns], rows, emphasised=names.index(TUNED) if TUNED in names else None)
