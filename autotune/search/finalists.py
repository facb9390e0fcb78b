"""Finalists: the best configurations by replay and the published defaults, measured until the fastest is known."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR
from autotune.documents.published_defaults import COMPARED_DEFAULTS
from autotune.documents.subnet import Subnet
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runs import Run
from autotune.evaluation.summary import bootstrap_ratio, summarize
from autotune.search.elimination import PROMPTS_PER_ROUND, Elimination, eliminate
from autotune.search.evaluator import Candidate, Evaluator
from autotune.search.model_pool import ModelPool
from autotune.search.uncertainty import ratio_interval, speedup_interval
from autotune.study.document import Finalist, MeasuredDefault
from autotune.trees.limits import Floats
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import Workload

NAMES = [*ascii_uppercase, *map("".join, itertools.product(ascii_uppercase, repeat=2))]  # of rows: A to Z, AA, AB, ...
MAX_SIMILAR = 2  # finalists with the same draft and policy
NUM_CONFIRMED, NUM_CONFIRMED_OF_KIND = 64, 8
MAX_TIE = 1.005  # ratio of speedups


def published_defaults(model_pool: ModelPool) -> dict[str, Configuration]:
    """The published defaults to compare with, each with a draft of its paper's kind where one is loaded. With
    recurrent states, these are chains only.
    """
    by_kind = {model_pool.kind(draft): draft for draft in reversed(model_pool.references)}
    first = next(iter(model_pool.references))
    return {
        name: default.model_copy(update={"draft": by_kind.get(name, by_kind.get("independent", first))})
        for name, default in COMPARED_DEFAULTS.items()
        if not model_pool.has_states or parse_policy(default.tree).is_chain
    }


def confirmable(fastest: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that are ranked again on confirming prompts: the ``NUM_CONFIRMED`` fastest on the choosing ones, and the
    ``NUM_CONFIRMED_OF_KIND`` fastest of each draft and policy.
    """
    num_of_kind: Counter[tuple[str | None, str]] = Counter()
    chosen = []
    for number, candidate in enumerate(fastest):
        kind = candidate.configuration.draft, candidate.policy
        num_of_kind[kind] += 1
        if number < NUM_CONFIRMED or num_of_kind[kind] <= NUM_CONFIRMED_OF_KIND:
            chosen.append(candidate)
    return chosen


def choose_finalists(candidates: Sequence[Candidate], evaluator: Evaluator, count: int) -> list[Candidate]:
    """Up to ``count`` distinct configurations to measure: the fastest of every (draft, subnet, policy), at most two of a
    draft and policy.

    Configurations are ranked on the evaluator's prompts. Those whose time is above that of the fastest in the whole 90 %
    interval of their ratio are left out.
    """
    here = [evaluator.evaluate(candidate.configuration) for candidate in candidates]
    fastest: dict[tuple[str | None, Subnet, str], Candidate] = {}
    for candidate in sorted(here, key=lambda candidate: candidate.rank):
        c = candidate.configuration
        fastest.setdefault((c.draft, c.subnet, candidate.policy), candidate)
    chosen: list[Candidate] = []
    num_similar: Counter[tuple[str | None, str]] = Counter()
    for candidate in fastest.values():
        kind = candidate.configuration.draft, candidate.policy
        if num_similar[kind] >= MAX_SIMILAR:
            continue
        if chosen and ratio_interval(evaluator, candidate.configuration, chosen[0].configuration)[0] > 1.0:
            continue
        num_similar[kind] += 1
        chosen.append(candidate)
        if len(chosen) == count:
            break
    return chosen


@dataclass(frozen=True)
class MeasuredFinalists:
    """Results of finalists and published defaults in real runs on tuning prompts."""

    winner: Configuration
    """The fastest of all, by estimates for all tuning prompts."""
    finalists: list[Finalist]
    defaults: list[MeasuredDefault]
    best_defaults: list[str]
    """Names of the defaults that are not significantly slower than the fastest default, which is first."""


def measure_finalists(
    finalists: Sequence[Candidate],
    defaults: Mapping[str, Configuration],
    runner: ArmRunner,
    evaluator: Evaluator,
    every: Evaluator,
    prompts: Workload,
    console: Console,
    *,
    seed: int,
    deadline: float,
    prompts_per_round: int = PROMPTS_PER_ROUND,
) -> MeasuredFinalists:
    """Run finalists and published defaults until the fastest is known or the time is over.

    Args:
        every: an evaluator of more prompts, on which finalists that measure alike are told apart.
        prompts: the first of those that ``evaluator`` has replayed.
        deadline: of ``time.monotonic``.
        prompts_per_round: number of prompts between two interim analyses.
    """
    by_arm = {f"finalist {number}": candidate for number, candidate in enumerate(finalists, start=1)}
    arms = [runner.arm(name, candidate.configuration) for name, candidate in by_arm.items()]
    with console.stage("finalists, measured") as update:
        elimination = eliminate(
            runner,
            arms,
            prompts,
            defaults=[runner.arm(name, configuration) for name, configuration in defaults.items()],
            prompts_per_round=prompts_per_round,
            seed=seed,
            deadline=deadline,
            report=lambda done, of: update(done, of, ""),
        )
    results = [
        _finalist(
            candidate, elimination.runs[name], elimination, evaluator, is_eliminated=name not in elimination.remaining
        )
        for name, candidate in by_arm.items()
    ]
    measured_defaults = []
    for name, configuration in defaults.items():
        own = elimination.runs[name]
        summary = summarize(name, own, elimination.runs[AR][: len(own)])
        measured_defaults.append(
            MeasuredDefault(
                name=name,
                configuration=configuration,
                speedup=summary.speedup,
                ci95=summary.ci95,
                num_runs=len(own),
                is_eliminated=name not in elimination.remaining_defaults,
            )
        )
    print_finalists(results, measured_defaults, evaluator, console)
    num_runs, num_prompts = len(elimination.runs[AR]), len(evaluator.tasks)
    order = np.arange(num_runs) % min(num_prompts, len(prompts.prompts))
    ratio = sum(run.decode_ms for run in elimination.runs[AR]) / evaluator.ar_ms[order].sum()
    console.say(f"plain decoding took {ratio:.2f} times as long as the cost table predicts")
    configurations = {name: candidate.configuration for name, candidate in by_arm.items()} | dict(defaults)
    estimates = {
        name: every.evaluate(finalist.configuration).speedup * finalist.speedup / finalist.predicted_speedup
        for name, finalist in zip(by_arm, results, strict=True)
    }
    winner = _winner(elimination, estimates)
    return MeasuredFinalists(configurations[winner], results, measured_defaults, elimination.remaining_defaults)


def _finalist(
    candidate: Candidate, runs: Sequence[Run], elimination: Elimination, evaluator: Evaluator, *, is_eliminated: bool
) -> Finalist:
    """A finalist's result, with its prediction for the prompts that were run, over and over.

    Predicted speedups, not times: a machine that has become slower since its cost table was measured is slower with and
    without a draft.
    """
    summary = summarize("finalist", runs, elimination.runs[AR][: len(runs)])
    configuration = candidate.configuration
    predicted, interval90 = _prediction(evaluator, configuration, len(runs))
    return Finalist(
        configuration=configuration,
        predicted_speedup=predicted,
        interval90=interval90,
        speedup=summary.speedup,
        ci95=summary.ci95,
        num_runs=len(runs),
        is_eliminated=is_eliminated,
    )


def _prediction(evaluator: Evaluator, configuration: Configuration, num_runs: int) -> tuple[float, tuple[float, float]]:
    """Predicted speedup on the prompts of so many runs, and its 90 % interval."""
    order = np.arange(num_runs) % len(evaluator.tasks)
    predicted_ms = evaluator.replay(configuration).decode_ms
    predicted = float(evaluator.ar_ms[order].sum() / predicted_ms[order].sum())
    low, high = speedup_interval(evaluator, configuration)
    scale = predicted / evaluator.evaluate(configuration).speedup  # to the prompts that were run
    return predicted, (low * scale, high * scale)


def _winner(elimination: Elimination, estimates: Mapping[str, float]) -> str:
    """The finalist with the highest estimate, of those that are not significantly slower than the fastest arm and not slower than
    a default; of estimates within ``MAX_TIE``, that of the smallest trees. The fastest default where one is faster than every finalist.

    Args:
        estimates: speedup of every finalist on all replayed prompts: the predicted one, times measured over predicted speedup on
            the prompts that were run (a ratio estimator). Few prompts are run, and they differ more than the predictions err.
    """
    runs = elimination.runs
    ms = {
        name: np.array([run.decode_ms for run in runs[name]])
        for name in (*elimination.remaining, *elimination.remaining_defaults)
    }
    fastest = min(ms, key=lambda name: float(ms[name].mean()))

    def on_common_runs(name: str, other: str) -> tuple[Floats, Floats]:
        count = min(len(ms[name]), len(ms[other]))  # defaults that were eliminated late have fewer
        return ms[name][:count], ms[other][:count]

    def is_open(name: str) -> bool:
        beside_defaults = [on_common_runs(name, default) for default in elimination.remaining_defaults]
        is_behind = any(own.sum() > others.sum() for own, others in beside_defaults)
        return not is_behind and bootstrap_ratio(*on_common_runs(name, fastest))[0] <= 1.0

    open_finalists = [name for name in elimination.remaining if is_open(name)]
    if not open_finalists:
        return fastest
    best = max(estimates[name] for name in open_finalists)
    tied = [name for name in open_finalists if estimates[name] * MAX_TIE >= best]
    return min(tied, key=lambda name: _nodes_per_round(runs[name]))


def _nodes_per_round(runs: Sequence[Run]) -> float:
    return sum(run.verified_nodes or 0 for run in runs) / max(1, sum(run.rounds for run in runs))


def print_finalists(
    finalists: Sequence[Finalist], defaults: Sequence[MeasuredDefault], evaluator: Evaluator, console: Console
) -> None:
    """Print predicted and measured speedups, and the configurations below the table."""
    named = dict(zip(NAMES, finalists, strict=False))
    rows = [
        [
            name,
            f"{finalist.predicted_speedup:.2f}x",
            _interval(finalist.interval90),
            f"{finalist.speedup:.2f}x",
            _interval(finalist.ci95),
            f"{100 * finalist.prediction_error:+.1f} %",
            f"{finalist.num_runs}" + (", eliminated" if finalist.is_eliminated else ""),
        ]
        for name, finalist in named.items()
    ]
    for default in defaults:
        predicted, interval90 = None, None
        if evaluator.can_replay(default.configuration):
            predicted, interval90 = _prediction(evaluator, default.configuration, default.num_runs)
        rows.append(
            [
                default.name,
                "-" if predicted is None else f"{predicted:.2f}x",
                _interval(interval90),
                f"{default.speedup:.2f}x",
                _interval(default.ci95),
                "-" if predicted is None else f"{100 * (predicted / default.speedup - 1):+.1f} %",
                f"{default.num_runs}" + (", eliminated" if default.is_eliminated else ""),
            ]
        )
    columns = ["finalist or default", "predicted", "90 % interval", "measured", "95 % CI", "prediction error", "runs"]
    console.table("Finalists and published defaults on tuning prompts", columns, rows)
    labels = {name: finalist.configuration.label for name, finalist in named.items()}
    print_labels(labels | {default.name: default.configuration.label for default in defaults}, console)


def _interval(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.2f}-{ends[1]:.2f}"


def print_labels(labels: Mapping[str, str], console: Console) -> None:
    """Print the configurations of a table's rows, in lines of at most 120 characters."""
    for name, label in labels.items():
        console.say(textwrap.fill(f"{name}: {label}", 120, subsequent_indent="   ", break_on_hyphens=False))
