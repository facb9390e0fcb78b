"""The last stages of a search: finalists, operating points, evaluation on held-out prompts, and the profile."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from autotune.console import Console
from autotune.contention import ContentionMonitor
from autotune.documents.condition import Condition
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoding_profile import (
    AR,
    TUNED,
    ComparedArm,
    DecodingProfile,
    DraftChoice,
    Evidence,
    Measured,
    OperatingPoint,
    Predicted,
    Shrinkage,
    WorkloadReference,
)
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import stamp
from autotune.evaluation.arms import DecoderArm
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runs import Run, prompt_evidence
from autotune.evaluation.summary import Summary, summarize
from autotune.runtime.load import decoder_for
from autotune.search.evaluator import Candidate, Evaluator
from autotune.search.finalists import (
    MeasuredFinalists,
    choose_finalists,
    confirmable,
    measure_finalists,
    published_defaults,
)
from autotune.search.held_out import gains_of, print_comparison, print_gains, run_held_out
from autotune.search.model_pool import ModelPool
from autotune.search.operating_points import propose_points
from autotune.search.plan import StageClock
from autotune.search.point_confirmation import PointConfirmation
from autotune.search.tree_search import TreeSearchResult
from autotune.search.tuning_prompts import TuningPrompts
from autotune.search.uncertainty import speedup_interval
from autotune.study.document import RUNS
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import Workload

D = TypeVar("D", ComparedArm, Measured)

# Prompts between two interim analyses, finalists, and published defaults (None: all), from the most to the fewest that are run.
ROUNDS: tuple[tuple[int, int, int | None], ...] = (
    (8, 6, None),
    (8, 4, None),
    (4, 4, None),
    (4, 2, None),
    (4, 2, 2),
    (4, 1, 1),
)
MAX_WARM_UP_S = 1.0
MAX_HELD_OUT_DEFAULTS = 3  # the fastest on tuning prompts
NUM_POINT_CANDIDATES = 200  # fastest configurations over all prompts, beside the fastest of each task


@dataclass
class ProfileSelection:
    """Makes a decoding profile from the result of a tree search."""

    trees: TreeSearchResult
    model_pool: ModelPool
    prompts: TuningPrompts
    """The evaluators of all tuning prompts, of those that chose the trees, and of those that confirm the choice."""
    folder: Path
    """The study's folder, which keeps the runs."""
    evaluate: Workload
    seed: int
    clock: StageClock
    console: Console

    measured: MeasuredFinalists | None = field(default=None, init=False)
    """Set by ``measure_finalists``."""

    def __post_init__(self) -> None:
        self.evaluator = self.prompts.every
        self.tune = self.prompts.workload
        self.table = self.evaluator.table
        self.runner = self.model_pool.runner(self.table, self.folder / RUNS)
        self.defaults = published_defaults(self.model_pool)

    def predicted_profile(self) -> DecodingProfile:
        """The profile for another device, with predictions only."""
        fastest = choose_finalists(confirmable(self.trees.fastest), self.prompts.confirming, 1)[0]
        points = [self._plain_point()]
        if fastest.speedup >= 1.0:
            common = self.evaluator.evaluate(fastest.configuration)
            points = [
                self._point(when, self.evaluator.with_fallback(c).configuration) for when, c in self.points(common)
            ]
        return self._profile(self.table.device, points)

    def measured_profile(self) -> DecodingProfile:
        """The profile for this device, with measurements on held-out prompts."""
        monitor = ContentionMonitor(str(self.model_pool.target.device))
        winner = self.measure_finalists(
            choose_finalists(confirmable(self.trees.fastest), self.prompts.confirming, ROUNDS[0][1])
        )
        points = [(Condition(), winner)]
        if self.evaluator.can_replay(winner):
            points = self.confirmed(self.points(self.evaluator.evaluate(winner)), winner)
        profile = self.evaluated(self._profile(self.model_pool.device, [self._point(when, c) for when, c in points]))
        self.console.say(monitor.contention.describe("while configurations were run"))
        return profile.model_copy(update={"provenance": stamp(monitor.contention)})

    def measure_finalists(self, candidates: Sequence[Candidate]) -> Configuration:
        """The fastest of the candidates, with their fallbacks, and the published defaults, on confirming prompts.

        Where the time is short, fewer of them run: the fastest by prediction.
        """
        confirming, deadline = self.prompts.confirming, self.clock.deadline_of("finalists")
        finalists = [confirming.with_fallback(candidate) for candidate in candidates]
        known = {name: c for name, c in self.defaults.items() if confirming.can_replay(c)}
        by_speed = sorted(known, key=lambda name: -self._predicted_speedup(known[name], confirming))
        by_speed += [name for name in self.defaults if name not in known]
        for prompts_per_round, num_finalists, num_defaults in ROUNDS:
            chosen = finalists[:num_finalists]
            defaults = {name: c for name, c in self.defaults.items() if name in by_speed[:num_defaults]}
            configurations = [*(candidate.configuration for candidate in chosen), *defaults.values()]
            if self._round_s(configurations, prompts_per_round) <= deadline - time.monotonic():
                break
        if len(configurations) < len(finalists) + len(self.defaults):
            self.console.say(
                f"in the time left, {len(chosen)} of {len(finalists)} finalists and {len(defaults)} of {len(self.defaults)} "
                "published defaults are measured"
            )
        self.measured = measure_finalists(
            chosen,
            defaults,
            self.runner,
            confirming,
            self.evaluator,
            self.prompts.confirming_workload,
            self.console,
            seed=self.seed,
            deadline=deadline,
            prompts_per_round=prompts_per_round,
        )
        return self.measured.winner

    def _round_s(self, configurations: Sequence[Configuration], num_prompts: int) -> float:
        """Predicted duration of runs of plain decoding and of these configurations, with their warm-ups, in seconds."""
        confirming = self.prompts.confirming
        trace = next(iter(confirming.traces.values()))
        prefill_s = float(np.mean(self.table.prefill.ms(trace.prompt_length, trace.num_visual_tokens > 0))) / 1e3
        plain_s = float(confirming.ar_ms.mean()) / 1e3
        decode_s = [plain_s, *(plain_s / self._predicted_speedup(c, confirming) for c in configurations)]
        return sum(num_prompts * (prefill_s + s) + prefill_s + min(MAX_WARM_UP_S, s) for s in decode_s)

    # ----------------------------------------------------------------------------------------------- operating points

    def points(self, winner: Candidate) -> list[tuple[Condition, Candidate]]:
        """Conditions under which another candidate is predicted to be faster than the winner, which is last."""
        fastest = [*self.trees.fastest[:NUM_POINT_CANDIDATES], *itertools.chain(*self.trees.fastest_by_task.values())]
        candidates = list({candidate.key: candidate for candidate in [winner, *fastest]}.values())
        return propose_points(candidates, self.evaluator, self.tune, seed=self.seed)

    def confirmed(
        self, points: list[tuple[Condition, Candidate]], winner: Configuration
    ) -> list[tuple[Condition, Configuration]]:
        """The points that beat the winner and the best published default in real runs, and the winner."""
        assert self.measured is not None
        best = self.measured.best_defaults
        confirmation = PointConfirmation(
            self.runner,
            self.evaluator,
            self.tune,
            winner,
            self.defaults[best[0]] if best else None,
            self.console,
            self.seed,
            self.clock.deadline_of("operating points"),
        )
        return [*confirmation.confirmed(points[:-1]), (Condition(), winner)]

    # ----------------------------------------------------------------------------------------------------- evaluation

    def evaluated(self, profile: DecodingProfile) -> DecodingProfile:
        """The profile with measurements on the evaluation prompts: its decoder beside the other arms."""
        assert self.measured is not None
        pool = self.model_pool
        decoder = decoder_for(
            profile, pool.target, lambda choice: pool.draft(choice.id, choice.subnet), processor=pool.processor
        )
        runner = ArmRunner(
            decoder,
            pool.processor,
            ledger=self.folder / RUNS,
            context=[
                pool.key,
                profile.threads,
                profile.prefill_threads,
                [point.model_dump(mode="json") for point in profile.points],
            ],
            draft_of=pool.draft_of,
        )
        last = configuration_of(profile.point)
        tuned = DecoderArm(TUNED, decoder, key=last.key if last else TUNED)
        defaults = {name: self.defaults[name] for name in self.measured.best_defaults[:MAX_HELD_OUT_DEFAULTS]}
        runs, best_default = run_held_out(
            runner,
            tuned,
            [runner.arm(name, default) for name, default in defaults.items()],
            self.evaluate,
            self.console,
            seed=self.seed + 1,
            deadline=self.clock.deadline_of("evaluation"),
        )
        summaries = {name: summarize(name, own, runs[AR][: len(own)]) for name, own in runs.items() if own}
        configurations: dict[str, Configuration | None] = dict.fromkeys(summaries) | defaults | {TUNED: last}
        configurations = {name: configurations[name] for name in (*(n for n in summaries if n != TUNED), TUNED)}
        predicted = {
            name: self.evaluator.evaluate(configuration).speedup
            for name, configuration in configurations.items()
            if configuration is not None and self.evaluator.can_replay(configuration)
        }
        labels = {name: configuration.label for name, configuration in configurations.items() if configuration}
        if len(profile.points) > 1:
            labels[TUNED] = f"{len(profile.points)} operating points"
            predicted.pop(TUNED, None)
        print_comparison({name: summaries[name] for name in configurations}, predicted, labels, self.console)
        gains = gains_of(runs, best_default)
        print_gains(gains, best_default, self.console)
        shrinkage = None if last is None else self._shrinkage(last, profile, runs)
        evidence = profile.evidence.model_copy(
            update={
                "prompts": [prompt_evidence(run, plain) for run, plain in zip(runs[TUNED], runs[AR], strict=True)],
                "compared": [
                    _from_summary(
                        ComparedArm,
                        summaries[name],
                        tree=configuration.tree if configuration else None,
                        visual_keep=configuration.visual_keep if configuration else None,
                        predicted_speedup=predicted.get(name),
                    )
                    for name, configuration in configurations.items()
                ],
                "best_default": best_default,
                "gains": gains,
                "shrinkage": shrinkage,
            }
        )
        return self._with_measurements(profile, evidence, runs, summaries)

    def _with_measurements(
        self,
        profile: DecodingProfile,
        evidence: Evidence,
        runs: Mapping[str, Sequence[Run]],
        summaries: Mapping[str, Summary],
    ) -> DecodingProfile:
        """The profile with its measured points, or with plain decoding where that is faster."""
        if summaries[TUNED].speedup >= 1.0:
            points = [
                point.model_copy(update={"measured": _measured_point(number, runs[TUNED], runs[AR])})
                for number, point in enumerate(profile.points)
            ]
            return profile.model_copy(update={"points": points, "evidence": evidence})
        self.console.say("plain decoding is faster than the tuned configuration: the profile decodes without a draft")
        measured = _measured(summaries[AR], summaries[AR])
        points = [self._plain_point().model_copy(update={"measured": measured})]
        plain = [prompt_evidence(run, run) for run in runs[AR]]  # checks compare with plain decoding
        return profile.model_copy(update={"points": points, "evidence": evidence.model_copy(update={"prompts": plain})})

    def _predicted_speedup(self, configuration: Configuration, evaluator: Evaluator) -> float:
        """The predicted speedup, or 1 where no trace has the configuration's draft variant."""
        return evaluator.evaluate(configuration).speedup if evaluator.can_replay(configuration) else 1.0

    def _shrinkage(
        self, winner: Configuration, profile: DecodingProfile, runs: Mapping[str, Sequence[Run]]
    ) -> Shrinkage:
        """How the winner's speedup shrank from the prompts that chose it to those that did not."""
        assert self.measured is not None
        choosing, confirming = (
            evaluator.evaluate(winner).speedup if evaluator.can_replay(winner) else None
            for evaluator in (self.prompts.choosing, self.prompts.confirming)
        )
        by_key = {finalist.configuration.key: finalist.speedup for finalist in self.measured.finalists}
        by_key |= {default.configuration.key: default.speedup for default in self.measured.defaults}
        pairs = list(zip(runs[TUNED], runs[AR], strict=True))
        own = [pair for pair in pairs if pair[0].point == len(profile.points) - 1]  # not those of other points
        measured = summarize(TUNED, *map(list, zip(*(own or pairs), strict=True)))
        found = Shrinkage(
            predicted_on_choosing=choosing,
            predicted_on_confirming=confirming,
            measured_on_confirming=by_key[winner.key],
            measured_on_held_out=measured.speedup,
        )
        if choosing is not None and confirming is not None:
            self.console.say(
                f"the tuned configuration: predicted {choosing:.2f}x on the {len(self.prompts.choosing.tasks)} prompts that "
                f"chose it and {confirming:.2f}x on {len(self.prompts.confirming.tasks)} others, measured "
                f"{found.measured_on_confirming:.2f}x on these and {found.measured_on_held_out:.2f}x on held-out prompts"
            )
        return found

    # -------------------------------------------------------------------------------------------------------- profile

    def _plain_point(self) -> OperatingPoint:
        ms, estimated = self.evaluator.ar_ms_per_token, self.table.estimated
        predicted = Predicted(speedup=1.0, ms_per_token=ms, tokens_per_round=None, estimated=estimated)
        return OperatingPoint(when=Condition(), draft=None, tree=None, predicted=predicted, measured=None)

    def _point(self, condition: Condition, configuration: Configuration) -> OperatingPoint:
        """An operating point that is not measured yet."""
        c = configuration
        reference = self.model_pool.references[c.draft or ""]
        predicted = None
        if self.evaluator.can_replay(c):
            candidate = self.evaluator.evaluate(c)
            predicted = Predicted(
                speedup=candidate.speedup,
                ms_per_token=candidate.ms_per_token,
                tokens_per_round=candidate.tokens_per_round,
                interval90=speedup_interval(self.evaluator, c, other_prompts=True),
                estimated=self.table.estimated,
            )
        return OperatingPoint(
            when=condition,
            draft=DraftChoice(
                kind=self.model_pool.kind(reference.id), id=reference.id, sha256=reference.sha256, subnet=c.subnet
            ),
            tree=parse_policy(c.tree),
            fallback=c.fallback,
            predicted=predicted,
            measured=None,
        )

    def _profile(self, device: Fingerprint, points: list[OperatingPoint]) -> DecodingProfile:
        return DecodingProfile(
            provenance=stamp(),
            target=self.model_pool.target_reference,
            workload=WorkloadReference(
                name=self.tune.name,
                tune_sha256=self.tune.sha256,
                evaluate_sha256=self.evaluate.sha256,
                num_tune_prompts=len(self.tune.prompts),
                num_evaluate_prompts=len(self.evaluate.prompts),
            ),
            hardware=device,
            precision=self.table.precision,
            capture_sizes=self.table.capture_sizes,
            mode=self.table.mode,
            attention_backends=self.table.attention_backends,
            threads=self.table.threads,
            prefill_threads=self.table.prefill_threads,
            points=points,
            evidence=Evidence(configurations_replayed=self.trees.num_replayed),
        )


def _from_summary(document: type[D], summary: Summary, **others: Any) -> D:
    """A document with the fields of a summary that have the same names, and ``others``."""
    shared = {name: value for name, value in vars(summary).items() if name in document.model_fields}
    return document(**{**shared, **others})


def _measured_point(number: int, runs: Sequence[Run], plain: Sequence[Run]) -> Measured | None:
    """Measurements of an operating point on the prompts that it decoded; None where it decoded nothing."""
    pairs = [(run, plain_run) for run, plain_run in zip(runs, plain, strict=True) if number == run.point]
    if not any(run.new_tokens > 1 for run, _ in pairs):
        return None
    own_runs, plain_runs = zip(*pairs, strict=True)
    return _measured(summarize(TUNED, own_runs, plain_runs), summarize(AR, plain_runs, plain_runs))


def _measured(summary: Summary, plain: Summary) -> Measured:
    tokens_per_round = None if summary is plain else summary.tokens_per_round
    others = {"tokens_per_round": tokens_per_round, "ar_tokens_per_second": plain.tokens_per_second}
    return _from_summary(Measured, summary, **others)
