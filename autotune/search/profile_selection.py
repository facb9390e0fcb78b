"""The last stages of a search: finalists, operating points, evaluation on held-out prompts, and the profile."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from autotune.console import Console
from autotune.documents.condition import Condition, RequestProperties, first_match
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoding_profile import (
    AR,
    HF,
    TUNED,
    DecodingProfile,
    Evidence,
    OperatingPoint,
    Predicted,
    WorkloadReference,
)
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import stamp
from autotune.evaluation.race import Fastest, TimeLimit, race
from autotune.evaluation.runtime_arms import DecoderArm, HuggingFaceArm, RuntimeArms, arms_of_pool
from autotune.evaluation.summary import ms_per_token, speedup
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.replay.draws import time_draws
from autotune.replay.evaluator import Candidate, Evaluator
from autotune.runtime.load import decoder_for
from autotune.runtime.model_pool import ModelPool
from autotune.search import thresholds
from autotune.search.evidence import Evaluation, print_evaluation
from autotune.search.finalists import (
    MeasuredFinalists,
    block_s,
    choose_finalists,
    confirmable,
    measure_finalists,
    published_defaults,
)
from autotune.search.held_out import differences_of, shrinkage_of, with_evidence
from autotune.search.operating_points import by_image, by_prompt_tokens, by_temperature, by_workload, choose_points
from autotune.search.plan import KeptPrompts, StageClock
from autotune.search.tree_search import TreeSearchResult
from autotune.search.tuning_prompts import TuningPrompts, speedup_interval
from autotune.study.storage import RUNS
from autotune.workloads.workload import Workload

POINT = "point"  # name of the arm that decodes with an operating point's configuration


@dataclass
class ProfileSelection:
    """Makes a decoding profile from the result of a tree search."""

    trees: TreeSearchResult
    model_pool: ModelPool
    prompts: TuningPrompts
    folder: Path
    """The study's folder, which keeps the runs."""
    evaluate: Workload
    seed: int
    kept_prompts: KeptPrompts
    """Prompts, finalists and defaults for which the plan has kept time."""
    clock: StageClock
    console: Console

    finalists: MeasuredFinalists | None = field(default=None, init=False)
    """Set by ``measured_profile``."""

    def __post_init__(self) -> None:
        self.evaluator = self.prompts.full
        table = self.evaluator.table
        self.arms = arms_of_pool(self.model_pool, table)
        context = [self.model_pool.key, (table.threads, table.prefill_threads)]
        self.runner = self.arms.runner(self.folder / RUNS, context=context)

    def predicted_profile(self) -> DecodingProfile:
        """The profile for another device, with predictions only."""
        (fastest,) = self.candidates(1)
        points: list[tuple[Condition, Configuration]] = []
        if fastest.speedup >= 1.0:
            proposed = self.points(self.evaluator.evaluate(fastest.configuration))
            points = [(when, self.evaluator.with_fallback(candidate).configuration) for when, candidate in proposed]
        return self.profile_of(self.evaluator.table.device, points)

    def measured_profile(self) -> DecodingProfile:
        """The profile for this device, with measurements on held-out prompts."""
        monitor = ContentionMonitor(str(self.model_pool.target.device))
        self.finalists = finalists = self.measure_finalists(self.candidates(thresholds.ROUNDS[0][1]))
        self.prompts = finalists.prompts  # points and predictions use the updated prices
        self.evaluator, winner = self.prompts.full, finalists.winner.configuration
        points = [(Condition(), winner)]
        if self.evaluator.can_replay(winner):
            *proposed, _ = self.points(self.evaluator.evaluate(winner))
            points = [*self.confirmed(proposed, finalists), *points]
        profile = self.evaluated(self.profile_of(self.model_pool.device, points), finalists)
        contention = monitor.contention()
        self.console.say(contention.describe("while configurations were run"))
        return profile.model_copy(update={"provenance": stamp(contention)})

    def candidates(self, count: int) -> list[Candidate]:
        """The configurations that are measured, ranked on confirming prompts."""
        return choose_finalists(confirmable(self.trees.fastest), self.prompts.confirming, count)

    def measure_finalists(self, candidates: list[Candidate]) -> MeasuredFinalists:
        """The results of candidates and published defaults in real runs."""
        return measure_finalists(
            candidates,
            published_defaults(self.model_pool),
            self.arms,
            self.runner,
            self.prompts,
            self.console,
            all_candidates=[*self.trees.fastest, *self.trees.fastest_of_tasks],
            least=self.kept_prompts[1:],
            seed=self.seed,
            deadline=self.clock.deadline_of("finalists"),
            last=self.clock.limit_of("finalists"),
        )

    def points(self, winner: Candidate) -> list[tuple[Condition, Candidate]]:
        """Conditions under which another candidate is predicted to be faster than the winner, which is last."""
        fastest = [*self.trees.fastest[: thresholds.NUM_POINT_CANDIDATES], *self.trees.fastest_of_tasks]
        candidates = list({candidate.key: candidate for candidate in [winner, *fastest]}.values())
        requests = self._requests()
        groupings = [
            by_workload(self.evaluator.tasks),
            by_temperature([request["temperature"] for request in requests]),
            by_image([request["has_image"] for request in requests]),
            *by_prompt_tokens([request["prompt_tokens"] for request in requests]),
        ]
        ms = self.evaluator.prompt_ms([candidate.configuration for candidate in candidates])
        points = choose_points(ms, groupings, common=0, seed=self.seed)
        return [(point.condition, candidates[point.configuration]) for point in points]

    def confirmed(
        self, points: Sequence[tuple[Condition, Candidate]], finalists: MeasuredFinalists
    ) -> list[tuple[Condition, Configuration]]:
        """The points that beat the winner and the best published default on the tuning prompts that meet their
        conditions.
        """
        deadline = self.clock.deadline_of("operating points")
        rivals = {"winner": finalists.winner.configuration, "default": next(iter(finalists.best_defaults.values()))}
        kept: list[tuple[Condition, Configuration]] = []
        rows: list[list[str]] = []
        labels: dict[str, str] = {}
        for number, (condition, predicted) in enumerate(points):
            candidate = self.evaluator.with_fallback(predicted).configuration
            if candidate.key in {rival.key for rival in rivals.values()}:
                continue
            arms = [self.arms.arm(name, c) for name, c in {**rivals, POINT: candidate}.items()]
            if time.monotonic() + thresholds.MIN_PROMPTS * self.runner.prompt_s(arms) > deadline:
                num_left = len(points) - number
                self.console.say(f"{num_left} operating points were not confirmed in their share of the budget")
                break
            requests = zip(self.prompts.workload.prompts, self._requests(), strict=True)
            prompts = [prompt for prompt, request in requests if condition.matches(**request)]
            runs = race(  # until the difference of the point to the others is significant or the time is over
                self.runner,
                arms,
                prompts,
                Fastest(
                    risk=thresholds.RISK,
                    prompts_per_block=thresholds.MIN_PROMPTS,
                    ends=lambda leaders: POINT not in leaders or len(leaders) == 1,
                ),
                time_limit=TimeLimit(deadline, thresholds.MIN_PROMPTS, self.clock.limit_of("operating points")),
                seed=self.seed,
            ).runs
            ratios = [speedup(runs[name], runs[POINT]) for name in rivals]
            is_faster = max(ratios) <= 1 - thresholds.MIN_GAIN
            name = f"{len(rows) + 1}"
            labels[name] = f"{condition.label}: {candidate.label}"
            cells = [*(f"{ratio:.2f}" for ratio in ratios), f"{len(runs[POINT])}", "yes" if is_faster else "no"]
            rows.append([name, *cells])
            if is_faster:
                kept.append((condition, candidate))
        if rows:
            columns = ["point", "time / winner's time", "time / best default's", "prompts", "kept"]
            self.console.table("Operating points on tuning prompts", columns, rows)
            self.console.labels(labels)
        return kept

    def evaluated(self, profile: DecodingProfile, finalists: MeasuredFinalists) -> DecodingProfile:
        """The profile with measurements on the evaluation prompts: its decoder next to the other arms."""
        best_defaults = dict(itertools.islice(finalists.best_defaults.items(), thresholds.MAX_HELD_OUT_DEFAULTS))
        evaluation = self.evaluation(profile, best_defaults)
        print_evaluation(evaluation, len(profile.points), self.console)
        shrinkage = shrinkage_of(finalists.winner, evaluation, len(profile.points), self.prompts)
        return with_evidence(profile, evaluation, shrinkage, self._plain_point())

    def evaluation(self, profile: DecodingProfile, defaults: Mapping[str, Configuration]) -> Evaluation:
        """Run the profile, plain decoding, Hugging Face and the defaults on held-out prompts until the end of the
        stage. The profile and plain decoding run on as many as the plan has kept time for, if need be without the
        defaults.

        Args:
            defaults: published defaults that may be the best one, the most probable one first. Others are not run where
                replay says, in nine of ten draws, that the profile is faster; they leave when they are significantly
                slower than the fastest. One that is the profile's only point has the runs of the profile.
        """
        pool, deadline = self.model_pool, self.clock.deadline_of("evaluation")
        decoder = decoder_for(profile, pool.target, lambda c: pool.draft(c.id, c.subnet), processor=pool.processor)
        points = [point.model_dump(mode="json") for point in profile.points]
        context = [pool.key, profile.threads, profile.prefill_threads, points]
        arms = RuntimeArms(decoder, draft_of=pool.draft_of, keys=pool.answer_keys)
        last = configuration_of(profile.point)
        assert last is not None, "a profile that decodes plainly has nothing to compare"
        tuned_to = {name for name, default in defaults.items() if len(points) == 1 and default.key == last.key}
        if (evaluator := self.evaluator).can_replay(last):
            replayable = [name for name in [*defaults][1:] if evaluator.can_replay(defaults[name])]
            beaten = [name for name in replayable if _is_slower(defaults[name], last, evaluator)]
            defaults = {name: default for name, default in defaults.items() if name not in beaten}
        tuned = DecoderArm(TUNED, decoder, arms, key=last.key)
        whole_s = block_s([last, *defaults.values()], evaluator, thresholds.HELD_OUT_PROMPTS)
        is_long = 3 * whole_s > deadline - time.monotonic()
        others = [arms.arm(name, default) for name, default in defaults.items() if name not in tuned_to]
        may_differ = not pool.target.text.is_exact
        examination_s = may_differ * thresholds.EXAMINATION_SHARE * max(0.0, deadline - time.monotonic())
        with self.console.stage("evaluation, measured", len(self.evaluate.prompts)) as update:
            measured = race(
                arms.runner(self.folder / RUNS, context=context),
                [arms.plain, tuned, HuggingFaceArm(HF, arms, threads=decoder.threads), *others],
                self.evaluate.prompts,
                Fastest(
                    risk=thresholds.RISK,
                    prompts_per_block=thresholds.MIN_PROMPTS if is_long else thresholds.HELD_OUT_PROMPTS,
                    always=[AR, TUNED],
                    briefly=[HF],
                    defaults=[arm.name for arm in others],
                    kept_prompts=self.kept_prompts[0],
                    ends=lambda _: False,
                ),
                time_limit=TimeLimit(deadline - examination_s, thresholds.MIN_PROMPTS, deadline),
                seed=self.seed + 1,
                report=update,
            )
        runs = measured.runs | {name: measured.runs[TUNED] for name in tuned_to}
        remaining = [*measured.remaining, *tuned_to]
        configurations = {AR: None, HF: None, **defaults, TUNED: last}
        replayed = {**defaults, **({TUNED: last} if len(points) == 1 else {})}
        return Evaluation(
            runs={name: runs[name] for name in configurations},
            configurations=configurations,
            predicted={name: self.evaluator.speedup(configuration) for name, configuration in replayed.items()},
            best_default=min(remaining, key=lambda name: ms_per_token(runs[name]), default=None),
            differences=differences_of(tuned, self.evaluate, measured.runs, deadline),
        )

    def profile_of(self, device: Fingerprint, points: Sequence[tuple[Condition, Configuration]]) -> DecodingProfile:
        """A profile of operating points that are not measured; without any, it decodes plainly."""
        table, tune = self.evaluator.table, self.prompts.workload
        modes = "precision", "capture_sizes", "mode", "attention_backends", "threads", "prefill_threads"
        return DecodingProfile(
            provenance=stamp(),
            target=self.model_pool.target_reference,
            workload=WorkloadReference(
                name=tune.name,
                tune_sha256=tune.sha256,
                evaluate_sha256=self.evaluate.sha256,
                num_tune_prompts=len(tune.prompts),
                num_evaluate_prompts=len(self.evaluate.prompts),
            ),
            hardware=device,
            **{name: getattr(table, name) for name in modes},
            points=self._predicted_points(points) or [self._plain_point()],
            evidence=Evidence(configurations_replayed=self.trees.num_replayed),
        )

    def _plain_point(self) -> OperatingPoint:
        evaluator = self.evaluator
        ms, estimated = evaluator.ar_ms_per_token, evaluator.table.estimated
        predicted = Predicted(speedup=1.0, ms_per_token=ms, tokens_per_round=None, estimated=estimated)
        return self.model_pool.point(None).model_copy(update={"predicted": predicted})

    def _predicted_points(self, points: Sequence[tuple[Condition, Configuration]]) -> list[OperatingPoint]:
        """Operating points that are not measured yet, each with a prediction for the tuning prompts that it decodes."""
        conditions = [condition for condition, _ in points]
        decoded_by = np.array([first_match(conditions, **request) for request in self._requests()] if points else [])
        made = []
        for number, (condition, c) in enumerate(points):
            prompts = np.flatnonzero(decoded_by == number)
            evaluator = self.evaluator.select(prompts) if len(prompts) else self.evaluator
            predicted = None
            if evaluator.can_replay(c):
                speed = evaluator.evaluate(c).model_dump(include={"speedup", "ms_per_token", "tokens_per_round"})
                interval90 = speedup_interval(evaluator, c, other_prompts=True)
                predicted = Predicted(**speed, interval90=interval90, estimated=evaluator.table.estimated)
            made.append(self.model_pool.point(c).model_copy(update={"when": condition, "predicted": predicted}))
        return made

    def _requests(self) -> list[RequestProperties]:
        """The properties of every tuning prompt that conditions ask for."""
        trace = next(iter(self.evaluator.traces.values()))
        sizes = zip(self.prompts.workload.prompts, trace.prompt_length, trace.num_visual_tokens, strict=True)
        return [
            RequestProperties(
                temperature=prompt.settings.temperature or 0.0,
                prompt_tokens=int(num_tokens),
                has_image=bool(num_visual > 0),
                workload=prompt.settings.task,
            )
            for prompt, num_tokens, num_visual in sizes
        ]


def _is_slower(configuration: Configuration, than: Configuration, evaluator: Evaluator) -> bool:
    """Whether replay says so in ``CONFIDENCE`` of the draws."""
    ms, than_ms = time_draws(evaluator, [configuration, than])
    return bool((ms > than_ms).mean() > thresholds.CONFIDENCE)
