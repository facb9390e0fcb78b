"""Finalists: the best configurations by replay and the published defaults, measured until the fastest is known."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, HF
from autotune.documents.published_defaults import COMPARED_DEFAULTS
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Fastest, Race, TimeLimit, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runtime_arms import WARM_UP_S, HuggingFaceArm, RuntimeArms, arms_of_pool
from autotune.evaluation.summary import ms_per_token, speedup, summarize, time_ratio
from autotune.replay.draws import time_draws
from autotune.replay.evaluator import Candidate, Evaluator
from autotune.replay.live_prices import updated_table
from autotune.runtime.model_pool import ModelPool
from autotune.search import thresholds
from autotune.search.plan import Plan
from autotune.search.tree_search import TreeSearchResult
from autotune.search.tuning import Tuning
from autotune.search.tuning_prompts import TuningPrompts, speedup_interval
from autotune.study.document import MeasuredConfiguration, finalists_table
from autotune.study.storage import RUNS
from autotune.trees.policy import parse_policy
from autotune.workloads.prompt import WorkloadPrompt


def published_defaults(pool: ModelPool) -> dict[str, Configuration]:
    """The published defaults to compare with, each with a draft of its paper's kind where one is loaded. With
    recurrent states, these are chains only.
    """
    by_kind = {pool.drafts[draft].kind: draft for draft in reversed(pool.references)}
    first = next(iter(pool.references))
    return {
        name: default.model_copy(update={"draft": by_kind.get(name, by_kind.get("independent", first))})
        for name, default in COMPARED_DEFAULTS.items()
        if not pool.has_states or parse_policy(default.tree).is_chain
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


class Races:
    """Races of arms that one runner times."""

    def __init__(self, arms: RuntimeArms, runner: ArmRunner, console: Console) -> None:
        self.arms, self.runner, self.console = arms, runner, console

    @classmethod
    def of(cls, tuning: Tuning, table: CostTable) -> Races:
        """Races on the CPU threads of a cost table, whose runs the study keeps."""
        arms = arms_of_pool(tuning.pool, table)
        context = [tuning.pool.key, (table.threads, table.prefill_threads)]
        return cls(arms, arms.runner(tuning.folder / RUNS, context=context), tuning.console)

    def hugging_face(self) -> Arm:
        """Hugging Face's ``generate`` with the same target and threads."""
        return HuggingFaceArm(HF, self.arms, threads=self.arms.decoder.threads)

    def run(
        self,
        name: str,
        configurations: Mapping[str, Configuration],
        prompts: Sequence[WorkloadPrompt],
        rule: Fastest,
        time_limit: TimeLimit,
        *,
        seed: int,
        others: Sequence[Arm] = (),
    ) -> Race:
        """A race of plain decoding, configurations by the names of their arms, and ``others``."""
        arms = [self.arms.plain, *(self.arms.arm(arm, c) for arm, c in configurations.items()), *others]
        with self.console.stage(f"{name}, measured", rule.passes * len(prompts)) as update:
            return race(self.runner, arms, prompts, rule, time_limit=time_limit, seed=seed, report=update)


@dataclass(frozen=True)
class Finalists:
    """Results of finalists and published defaults in real runs on tuning prompts."""

    winner: MeasuredConfiguration
    """The fastest of all, by estimates for all tuning prompts."""
    finalists: list[MeasuredConfiguration]
    defaults: list[MeasuredConfiguration]
    best_defaults: dict[str, Configuration]
    """The defaults that are not significantly slower than the fastest default, which is first."""
    prompts: TuningPrompts
    """The tuning prompts, with prices that the rounds of the finalists have updated."""


@dataclass(frozen=True)
class Entrants:
    """The configurations of a race, by the names of their arms."""

    finalists: Mapping[str, Configuration]
    defaults: Mapping[str, Configuration]
    prompts_per_block: int

    @property
    def all(self) -> dict[str, Configuration]:
        return {**self.finalists, **self.defaults}


def measure_finalists(
    tuning: Tuning, plan: Plan, prompts: TuningPrompts, trees: TreeSearchResult, races: Races
) -> Finalists:
    """Run finalists, with their fallbacks, and published defaults on confirming prompts until the fastest is known or
    the time is over. Where the time is short, fewer of them run: the fastest by prediction.

    Their rounds update the prices, all candidates are replayed with them, and those that now lead run beside the
    winner.
    """
    candidates = choose_finalists(confirmable(trees.fastest), prompts.confirming, thresholds.RACE_SIZES[0][1])
    whole = Entrants(
        _named([prompts.confirming.with_fallback(candidate) for candidate in candidates]),
        published_defaults(tuning.pool),
        0,
    )
    deadline, last = tuning.clock.deadline_of("finalists"), tuning.clock.limit_of("finalists")
    seed, console = tuning.settings.seed, tuning.console
    now = time.monotonic()
    first_deadline = now + (1.0 - thresholds.SECOND_RACE_SHARE) * (deadline - now)
    seconds = {**dict.fromkeys(thresholds.RACE_SIZES[:-1], first_deadline - now), plan.kept_prompts[1:]: deadline - now}
    entrants = fitting(whole, prompts.confirming, seconds)
    if len(entrants.all) < len(whole.all):
        console.say(
            f"in the time left, {len(entrants.finalists)} of {len(whole.finalists)} finalists and "
            f"{len(entrants.defaults)} of {len(whole.defaults)} published defaults are measured"
        )
    # The first block was chosen to fit.
    limit = TimeLimit(first_deadline, entrants.prompts_per_block, last)
    first = compete(entrants, prompts, races, limit, seed)
    leading = leaders(trees.fastest, first)
    again = Entrants(
        {first.winner.name: first.winner.configuration, **_named(leading, after=len(whole.finalists))},
        {},
        entrants.prompts_per_block,
    )
    again_s = block_s(again.all, prompts.confirming, thresholds.MIN_PROMPTS)
    if not leading or first.winner.name in entrants.defaults or again_s > deadline - time.monotonic():
        return first
    console.say(
        f"with the prices of these rounds, other configurations may be faster: {len(leading)} run beside the winner"
    )
    limit = TimeLimit(deadline, min(thresholds.MIN_PROMPTS, entrants.prompts_per_block), last)
    second = compete(again, first.prompts, races, limit, seed + 1)
    known = {finalist.name for finalist in first.finalists}
    finalists = [*first.finalists, *(finalist for finalist in second.finalists if finalist.name not in known)]
    winner = next(finalist for finalist in finalists if finalist.name == second.winner.name)
    return replace(first, winner=winner, finalists=finalists, prompts=second.prompts)


def _named(candidates: Sequence[Candidate], after: int = 0) -> dict[str, Configuration]:
    return {
        f"finalist {number}": candidate.configuration for number, candidate in enumerate(candidates, start=after + 1)
    }


def compete(entrants: Entrants, prompts: TuningPrompts, races: Races, limit: TimeLimit, seed: int) -> Finalists:
    """A race on the confirming prompts, who wins it, and the prices that follow from its rounds."""
    rule = Fastest(
        risk=thresholds.RISK,
        prompts_per_block=entrants.prompts_per_block,
        passes=thresholds.MAX_PASSES,
        always=[AR],
        defaults=[*entrants.defaults],
    )
    measured = races.run("finalists", entrants.all, prompts.confirming_workload.prompts, rule, limit, seed=seed)
    documents = {name: _document(name, c, measured, prompts.confirming) for name, c in entrants.all.items()}
    estimates = {name: estimated_speedup(documents[name], prompts.full) for name in entrants.finalists}
    runs = {name: (c, measured.runs[name]) for name, c in entrants.all.items()}
    result = Finalists(
        winner=documents[winner_of(measured, estimates)],
        finalists=[documents[name] for name in entrants.finalists],
        defaults=[documents[name] for name in entrants.defaults],
        best_defaults={name: entrants.defaults[name] for name in measured.remaining if name in entrants.defaults},
        prompts=prompts.with_table(updated_table(prompts.confirming, runs, measured.runs[AR])),
    )
    races.console.show(finalists_table([*result.finalists, *result.defaults]))
    plain_ms = [run.decode_ms for run in measured.runs[AR]]
    order = np.arange(len(plain_ms)) % len(prompts.confirming.tasks)
    ratio = sum(plain_ms) / prompts.confirming.ar_ms[order].sum()
    races.console.say(f"plain decoding took {ratio:.2f} times as long as the cost table predicts")
    return result


def leaders(candidates: Sequence[Candidate], measured: Finalists) -> list[Candidate]:
    """Up to ``MAX_LEADERS`` configurations that are not measured and that are predicted to be faster than the winner;
    the fastest first.
    """
    winner, prompts = measured.winner.configuration, measured.prompts
    if not prompts.full.can_replay(winner):
        return []
    best_ms = min(candidate.ms_per_token for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.ms_per_token <= thresholds.MAX_MOVED_PRICE * best_ms]
    results = prompts.choosing.replay_many([candidate.configuration for candidate in near])
    here = [prompts.choosing.candidate(c.configuration, result) for c, result in zip(near, results, strict=True)]
    ranked = confirmable(sorted(here, key=lambda c: c.rank))
    fastest = choose_finalists(ranked, prompts.confirming, thresholds.MAX_LEADERS)
    known = {arm.configuration.key for arm in (*measured.finalists, *measured.defaults)}
    new = [c for c in map(prompts.confirming.with_fallback, fastest) if c.key not in known]
    least = thresholds.MAX_TIE * prompts.full.evaluate(winner).speedup
    return [candidate for candidate in new if prompts.full.evaluate(candidate.configuration).speedup > least]


def fitting(whole: Entrants, confirming: Evaluator, seconds: Mapping[tuple[int, int, int | None], float]) -> Entrants:
    """The entrants by the first of some race sizes whose block ends in its time, or by the last of ``RACE_SIZES``."""
    ranked = sorted(whole.defaults, key=lambda name: -(confirming.speedup(whole.defaults[name]) or 0.0))
    for size in (*seconds, thresholds.RACE_SIZES[-1]):
        prompts_per_block, num_finalists, num_defaults = size
        entrants = Entrants(
            dict(itertools.islice(whole.finalists.items(), num_finalists)),
            {name: c for name, c in whole.defaults.items() if name in ranked[:num_defaults]},
            prompts_per_block,
        )
        if block_s(entrants.all, confirming, prompts_per_block) <= seconds.get(size, 0.0):
            break
    return entrants


def block_s(configurations: Mapping[str, Configuration], confirming: Evaluator, num_prompts: int) -> float:
    """Predicted duration of runs of plain decoding and of these configurations, with their warm-ups, in seconds."""
    trace = next(iter(confirming.traces.values()))
    prefill_ms = confirming.table.prefill.ms(trace.prompt_length, trace.num_patches)
    prefill_s, plain_s = float(np.mean(prefill_ms)) / 1e3, float(confirming.ar_ms.mean()) / 1e3
    decode_s = [plain_s, *(plain_s / (confirming.speedup(c) or 1.0) for c in configurations.values())]
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
