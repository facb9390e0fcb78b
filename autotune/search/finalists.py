"""Finalists: the best configurations by replay, measured until the fastest is known."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

import numpy as np

from autotune.console import Console
from autotune.documents.decoding_profile import AR
from autotune.documents.subnet import Subnet
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import bootstrap_ratio, summarize
from autotune.search.elimination import eliminate
from autotune.search.evaluator import Candidate, Evaluator
from autotune.study.document import Finalist
from autotune.workloads.workload import Workload

NAMES = [*ascii_uppercase, *map("".join, itertools.product(ascii_uppercase, repeat=2))]  # of rows: A to Z, AA, AB, ...
MAX_SIMILAR = 2  # finalists with the same draft and policy
MAX_TIE = 1.005  # times the fastest arm's total time


def choose_finalists(
    candidates: Sequence[Candidate], evaluator: Evaluator, count: int, *, slack: float = 0.05
) -> list[Candidate]:
    """Up to ``count`` distinct configurations to measure: the fastest of every (draft, subnet, policy), at most two of a
    draft and policy.

    Configurations are left out if they are significantly slower than the fastest by more than ``slack``, an allowance for
    errors of the prediction.
    """
    fastest: dict[tuple[str | None, Subnet, str], Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.rank):
        c = candidate.configuration
        fastest.setdefault((c.draft, c.subnet, candidate.policy), candidate)
    chosen: list[Candidate] = []
    num_similar: Counter[tuple[str | None, str]] = Counter()
    fastest_ms = None
    for candidate in fastest.values():
        kind = candidate.configuration.draft, candidate.policy
        if num_similar[kind] >= MAX_SIMILAR:
            continue
        (ms,) = evaluator.prompt_ms([candidate.configuration])
        fastest_ms = ms if fastest_ms is None else fastest_ms
        if bootstrap_ratio(ms, fastest_ms)[0] > 1.0 + slack:
            continue
        num_similar[kind] += 1
        chosen.append(candidate)
        if len(chosen) == count:
            break
    return chosen


def measure_finalists(
    finalists: Sequence[Candidate],
    runner: ArmRunner,
    evaluator: Evaluator,
    prompts: Workload,
    console: Console,
    *,
    seed: int,
    deadline: float,
) -> tuple[Candidate, list[Finalist]]:
    """Run finalists until one remains or the time is over; returns the winner and all results. Ties go to the smaller tree.

    ``prompts`` are the first of those that the evaluator has replayed; ``deadline`` is of ``time.monotonic``.
    """
    by_arm = {f"finalist {number}": candidate for number, candidate in enumerate(finalists, start=1)}
    arms = [runner.arm(name, candidate.configuration) for name, candidate in by_arm.items()]
    with console.stage("finalists, measured") as update:
        elimination = eliminate(
            runner, arms, prompts, seed=seed, deadline=deadline, report=lambda done, of: update(done, of, "")
        )
    runs, num_prompts = elimination.runs, len(prompts.prompts)
    results = []
    for name, candidate in by_arm.items():
        summary = summarize(name, runs[name], runs[AR][: len(runs[name])])
        # On the prompts that were run, over and over. Of speedups, not of times: a machine that has become slower since
        # its cost table was measured is slower with and without a draft.
        order = np.arange(len(runs[name])) % num_prompts
        predicted_ms = evaluator.replay(candidate.configuration).decode_ms
        results.append(
            Finalist(
                configuration=candidate.configuration,
                predicted_speedup=float(evaluator.ar_ms[order].sum() / predicted_ms[order].sum()),
                speedup=summary.speedup,
                ci95=summary.ci95,
                num_runs=len(runs[name]),
                is_eliminated=name not in elimination.remaining,
            )
        )
    print_finalists(results, console)
    predicted_ar_ms = float(evaluator.ar_ms[:num_prompts].sum() * len(runs[AR]) / num_prompts)
    ratio = sum(run.decode_ms for run in runs[AR]) / predicted_ar_ms
    console.say(f"plain decoding took {ratio:.2f} times as long as the cost table predicts")
    ms = {name: np.array([run.decode_ms for run in runs[name]]) for name in elimination.remaining}
    winner = fastest = elimination.remaining[0]
    for name in elimination.remaining[1:]:
        is_tied = bootstrap_ratio(ms[name], ms[fastest])[0] <= 1.0 and ms[name].sum() <= MAX_TIE * ms[fastest].sum()
        if is_tied and by_arm[name].nodes_per_round < by_arm[winner].nodes_per_round:
            winner = name
    return by_arm[winner], results


def print_finalists(finalists: Sequence[Finalist], console: Console) -> None:
    """Print predicted and measured speedups, and the configurations below the table."""
    named = dict(zip(NAMES, finalists, strict=False))
    rows = [
        [
            name,
            f"{finalist.predicted_speedup:.2f}x",
            f"{finalist.speedup:.2f}x",
            f"{finalist.ci95[0]:.2f}-{finalist.ci95[1]:.2f}",
            f"{100 * finalist.prediction_error:+.1f} %",
            f"{finalist.num_runs}" + (", eliminated" if finalist.is_eliminated else ""),
        ]
        for name, finalist in named.items()
    ]
    columns = ["finalist", "predicted", "measured", "95 % CI", "prediction error", "runs"]
    console.table("Finalists on tuning prompts", columns, rows)
    print_labels({name: finalist.configuration.label for name, finalist in named.items()}, console)


def print_labels(labels: Mapping[str, str], console: Console) -> None:
    """Print the configurations of a table's rows, in lines of at most 120 characters."""
    for name, label in labels.items():
        console.say(textwrap.fill(f"{name}: {label}", 120, subsequent_indent="   ", break_on_hyphens=False))
