"""Finalists: the best configurations by replay and the published defaults, measured until the fastest is known."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR
from autotune.documents.published_defaults import COMPARED_DEFAULTS
from autotune.evaluation.race import Fastest, Race, TimeLimit, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runtime_arms import WARM_UP_S, RuntimeArms
from autotune.evaluation.summary import ms_per_token, speedup, summarize, time_ratio
from autotune.replay.draws import time_draws
from autotune.replay.evaluator import Candidate, Evaluator
from autotune.replay.live_prices import updated_table
from autotune.runtime.model_pool import ModelPool
from autotune.search import thresholds
from autotune.search.tuning_prompts import TuningPrompts, speedup_interval
from autotune.study.document import MeasuredConfiguration
from autotune.trees.policy import parse_policy


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
    """The candidates that are ranked again on confirming prompts: the ``NUM_CONFIRMED`` fastest on the choosing ones,
    and the ``NUM_CONFIRMED_OF_KIND`` fastest of each draft and policy.
    """
    num_of_kind: Counter[tuple[str | None, str]] = Counter()
    chosen = []
    for number, candidate in enumerate(fastest):
        kind = candidate.configuration.draft, candidate.policy
        num_of_kind[kind] += 1
        if number < thresholds.NUM_CONFIRMED or num_of_kind[kind] <= thresholds.NUM_CONFIRMED_OF_KIND:
            chosen.append(candidate)
    return chosen


def choose_finalists(candidates: Sequence[Candidate], evaluator: Evaluator, count: int) -> list[Candidate]:
    """Up to ``count`` distinct configurations to measure: of every (draft, subnet, policy) one, at most two of a draft
    and policy.

    They are ranked by the share of draws in which they are the fastest of all: prices and prompts are drawn from what
    the cost table and the evaluator's prompts leave open (``autotune.replay.draws``). Of more than two, a
    configuration that is slower than the first one in ``CONFIDENCE`` of the draws is left out.
    """
    here = sorted((evaluator.evaluate(candidate.configuration) for candidate in candidates), key=lambda c: c.rank)
    ms = time_draws(evaluator, [candidate.configuration for candidate in here])
    num_fastest = np.bincount(ms.argmin(0), minlength=len(here))
    kinds = [(c.configuration.draft, c.policy) for c in here]
    chosen: list[int] = []
    for number in np.argsort(-num_fastest, kind="stable").tolist():
        similar = [other for other in chosen if kinds[other] == kinds[number]]
        is_new = here[number].configuration.subnet not in [here[other].configuration.subnet for other in similar]
        is_slower = len(chosen) > 1 and float((ms[number] > ms[chosen[0]]).mean()) > thresholds.CONFIDENCE
        if len(chosen) < count and len(similar) < thresholds.MAX_SIMILAR and is_new and not is_slower:
            chosen.append(number)
    return [here[number] for number in chosen]


@dataclass(frozen=True)
class MeasuredFinalists:
    """Results of finalists and published defaults in real runs on tuning prompts."""

    winner: MeasuredConfiguration
    """The fastest of all, by estimates for all tuning prompts."""
    finalists: list[MeasuredConfiguration]
    defaults: list[MeasuredConfiguration]
    best_defaults: dict[str, Configuration]
    """The defaults that are not significantly slower than the fastest default, which is first."""
    prompts: TuningPrompts
    """The tuning prompts, with prices that their rounds have updated."""


def measure_finalists(
    candidates: Sequence[Candidate],
    defaults: Mapping[str, Configuration],
    runtime: RuntimeArms,
    runner: ArmRunner,
    prompts: TuningPrompts,
    console: Console,
    *,
    all_candidates: Sequence[Candidate],
    least: tuple[int, int, int | None] = thresholds.ROUNDS[-1],
    seed: int,
    deadline: float,
    last: float = math.inf,
) -> MeasuredFinalists:
    """Run finalists, with their fallbacks, and published defaults on confirming prompts until the fastest is known or
    the time is over. Where the time is short, fewer of them run: the fastest by prediction.

    Their rounds update the prices, all candidates are replayed with them, and those that now lead run beside the
    winner.

    Args:
        candidates: the fastest first.
        all_candidates: every configuration that may lead with other prices.
        least: prompts, finalists and published defaults for which the search has kept the time until the deadline.
        deadline: a value of ``time.monotonic``.
        last: the first prompts may end past the deadline, until then.
    """
    confirming = prompts.confirming
    finalists = {
        f"finalist {number}": confirming.with_fallback(candidate).configuration
        for number, candidate in enumerate(candidates, start=1)
    }
    first_deadline = time.monotonic() + (1.0 - thresholds.SECOND_RACE_SHARE) * (deadline - time.monotonic())
    deadlines = {**dict.fromkeys(thresholds.ROUNDS[:-1], first_deadline), least: deadline}
    prompts_per_block, fitting, fitting_defaults = _fitting(finalists, defaults, confirming, deadlines)
    if len(fitting) + len(fitting_defaults) < len(finalists) + len(defaults):
        console.say(
            f"in the time left, {len(fitting)} of {len(finalists)} finalists and {len(fitting_defaults)} of "
            f"{len(defaults)} published defaults are measured"
        )

    def compete(
        finalists: Mapping[str, Configuration],
        defaults: Mapping[str, Configuration],
        at: TuningPrompts,
        time_limit: TimeLimit,
        seed: int,
    ) -> tuple[Race, dict[str, MeasuredConfiguration], MeasuredConfiguration, TuningPrompts]:
        """A race, with the documents of its arms, the one that wins, and the prices that follow from its rounds."""
        arms = {**finalists, **defaults}
        with console.stage(
            "finalists, measured", thresholds.MAX_PASSES * len(at.confirming_workload.prompts)
        ) as update:
            measured = race(
                runner,
                [runtime.plain, *(runtime.arm(name, configuration) for name, configuration in arms.items())],
                at.confirming_workload.prompts,
                Fastest(
                    risk=thresholds.RISK,
                    prompts_per_block=prompts_per_block,
                    passes=thresholds.MAX_PASSES,
                    always=[AR],
                    defaults=[*defaults],
                ),
                time_limit=time_limit,
                seed=seed,
                report=update,
            )
        documents = {name: _document(name, c, measured, at.confirming) for name, c in arms.items()}
        print_finalists(documents, console)
        estimates = {name: estimated_speedup(documents[name], at.full) for name in finalists}
        runs = {name: (c, measured.runs[name]) for name, c in arms.items()}
        table = updated_table(at.confirming, runs, measured.runs[AR])
        return measured, documents, documents[winner_of(measured, estimates)], at.with_table(table)

    # The first block was chosen to fit.
    measured, documents, winner, updated = compete(
        fitting, fitting_defaults, prompts, TimeLimit(first_deadline, prompts_per_block, last), seed
    )
    plain_ms = [run.decode_ms for run in measured.runs[AR]]
    ratio = sum(plain_ms) / confirming.ar_ms[np.arange(len(plain_ms)) % len(confirming.tasks)].sum()
    console.say(f"plain decoding took {ratio:.2f} times as long as the cost table predicts")
    leading = leaders(all_candidates, winner.configuration, [d.configuration.key for d in documents.values()], updated)
    if leading and winner.name in fitting:
        again = {winner.name: winner.configuration} | {
            f"finalist {len(finalists) + number}": one.configuration for number, one in enumerate(leading, start=1)
        }
        if block_s([*again.values()], confirming, thresholds.MIN_PROMPTS) <= deadline - time.monotonic():
            console.say(
                f"with the prices of these rounds, other configurations may be faster: {len(leading)} run beside the winner"
            )
            num_first = min(thresholds.MIN_PROMPTS, prompts_per_block)
            _, more, winner, updated = compete(again, {}, updated, TimeLimit(deadline, num_first, last), seed + 1)
            documents |= more | documents
            winner = documents[winner.name]
    return MeasuredFinalists(
        winner,
        [document for name, document in documents.items() if name not in defaults],
        [documents[name] for name in fitting_defaults],
        {name: defaults[name] for name in measured.remaining if name in defaults},
        updated,
    )


def leaders(
    candidates: Sequence[Candidate], winner: Configuration, measured: Sequence[str], prompts: TuningPrompts
) -> list[Candidate]:
    """Up to ``MAX_LEADERS`` configurations, none with a key in ``measured``, that are predicted to be faster than the
    winner; the fastest first.
    """
    if not prompts.full.can_replay(winner):
        return []
    best_ms = min(candidate.ms_per_token for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.ms_per_token <= thresholds.MAX_MOVED_PRICE * best_ms]
    results = prompts.choosing.replay_many([candidate.configuration for candidate in near])
    here = [prompts.choosing.candidate(c.configuration, result) for c, result in zip(near, results, strict=True)]
    ranked = confirmable(sorted(here, key=lambda c: c.rank))
    fastest = choose_finalists(ranked, prompts.confirming, thresholds.MAX_LEADERS)
    new = [c for c in map(prompts.confirming.with_fallback, fastest) if c.key not in measured]
    least = thresholds.MAX_TIE * prompts.full.evaluate(winner).speedup
    return [candidate for candidate in new if prompts.full.evaluate(candidate.configuration).speedup > least]


def _fitting(
    finalists: Mapping[str, Configuration],
    defaults: Mapping[str, Configuration],
    confirming: Evaluator,
    deadlines: Mapping[tuple[int, int, int | None], float],
) -> tuple[int, dict[str, Configuration], dict[str, Configuration]]:
    """The first of the rounds whose block ends before its deadline, or the last of ``ROUNDS``: prompts, finalists,
    defaults.
    """
    ranked = sorted(defaults, key=lambda name: -(confirming.speedup(defaults[name]) or 0.0))
    for round_ in (*deadlines, thresholds.ROUNDS[-1]):
        prompts_per_block, num_finalists, num_defaults = round_
        fitting = dict(itertools.islice(finalists.items(), num_finalists))
        fitting_defaults = {name: c for name, c in defaults.items() if name in ranked[:num_defaults]}
        configurations = [*fitting.values(), *fitting_defaults.values()]
        if block_s(configurations, confirming, prompts_per_block) <= deadlines.get(round_, 0.0) - time.monotonic():
            break
    return prompts_per_block, fitting, fitting_defaults


def block_s(configurations: Sequence[Configuration], confirming: Evaluator, num_prompts: int) -> float:
    """Predicted duration of runs of plain decoding and of these configurations, with their warm-ups, in seconds."""
    trace = next(iter(confirming.traces.values()))
    prefill_ms = confirming.table.prefill.ms(trace.prompt_length, trace.num_patches)
    prefill_s, plain_s = float(np.mean(prefill_ms)) / 1e3, float(confirming.ar_ms.mean()) / 1e3
    decode_s = [plain_s, *(plain_s / (confirming.speedup(c) or 1.0) for c in configurations)]
    return sum(num_prompts * (prefill_s + s) + prefill_s + min(WARM_UP_S, s) for s in decode_s)


def _document(name: str, configuration: Configuration, measured: Race, confirming: Evaluator) -> MeasuredConfiguration:
    """The measurement of an arm of the race, beside the prediction for the prompts that were run, over and over.

    Speedups are compared: a machine that has become slower since its cost table was measured is slower with and without
    a draft.
    """
    runs = measured.runs[name]
    summary = summarize(name, runs, measured.runs[AR][: len(runs)])
    predicted, interval90 = None, None
    if confirming.can_replay(configuration):
        order = np.arange(len(runs)) % len(confirming.tasks)
        predicted_ms = confirming.replay(configuration).decode_ms
        predicted = float(confirming.ar_ms[order].sum() / predicted_ms[order].sum())
        low, high = speedup_interval(confirming, configuration)
        scale = predicted / confirming.evaluate(configuration).speedup  # to the prompts that were run
        interval90 = low * scale, high * scale
    return MeasuredConfiguration(
        name=name,
        configuration=configuration,
        speedup=summary.speedup,
        ci95=summary.ci95,
        num_runs=len(runs),
        is_eliminated=name not in measured.remaining,
        predicted_speedup=predicted,
        interval90=interval90,
    )


def estimated_speedup(finalist: MeasuredConfiguration, evaluator: Evaluator) -> float:
    """Speedup of a finalist on the evaluator's prompts: the predicted one, times measured over predicted speedup on the
    prompts that were run (a ratio estimator). Few prompts are run, and they differ more than the predictions err.
    Without a prediction, where the finalist's trees leave the traces of these prompts, it is the measured one.
    """
    if finalist.predicted_speedup is None:
        return finalist.speedup
    return evaluator.evaluate(finalist.configuration).speedup * finalist.speedup / finalist.predicted_speedup


def winner_of(measured: Race, estimates: Mapping[str, float]) -> str:
    """The finalist with the highest estimate, of those that are not significantly slower than the fastest arm and not
    slower than a default; of estimates within ``MAX_TIE``, the one with the smallest trees. The fastest default where
    one is faster than every finalist.

    Speeds are times per token, so that a shorter answer is no gain. ``estimates`` are the finalists'
    ``estimated_speedup``.
    """
    remaining = {name: measured.runs[name] for name in measured.remaining}
    finalists = {name: runs for name, runs in remaining.items() if name in estimates}
    defaults = {name: runs for name, runs in remaining.items() if name not in estimates}
    fastest_name, fastest = min(remaining.items(), key=lambda arm: ms_per_token(arm[1]))

    def is_open(runs: Sequence[Decoded]) -> bool:
        is_behind = any(speedup(runs, default) < 1.0 for default in defaults.values())
        return not is_behind and time_ratio(runs, fastest)[0] <= 1.0

    open_finalists = [name for name, runs in finalists.items() if is_open(runs)]
    if not open_finalists:
        return fastest_name
    best = max(estimates[name] for name in open_finalists)
    tied = [name for name in open_finalists if estimates[name] * thresholds.MAX_TIE >= best]
    return min(tied, key=lambda name: _nodes_per_round(finalists[name]))


def _nodes_per_round(runs: Sequence[Decoded]) -> float:
    return sum(run.verified_nodes or 0 for run in runs) / max(1, sum(run.rounds for run in runs))


def print_finalists(documents: Mapping[str, MeasuredConfiguration], console: Console) -> None:
    """Print predicted and measured speedups of finalists and defaults, and the configurations below the table."""
    rows = []
    for name, measured in documents.items():
        prediction = ["-", "-"]
        if measured.predicted_speedup is not None and measured.interval90 is not None:
            predicted, (low, high) = measured.predicted_speedup, measured.interval90
            error = f"{100 * (predicted / measured.speedup - 1):+.1f} %"
            prediction = [f"{predicted:.2f}x ({low:.2f}-{high:.2f})", error]
        measurement = f"{measured.speedup:.2f}x ({measured.ci95[0]:.2f}-{measured.ci95[1]:.2f})"
        num_runs = f"{measured.num_runs}" + (", eliminated" if measured.is_eliminated else "")
        rows.append([name, prediction[0], measurement, num_runs, *(prediction[1:] if console.verbose else [])])
    columns = ["finalist or default", "predicted (90 %)", "measured (95 %)", "runs"]
    columns += ["prediction error"] if console.verbose else []
    console.table("Finalists and published defaults on tuning prompts", columns, rows)
    console.labels({name: measured.configuration.label for name, measured in documents.items()})
