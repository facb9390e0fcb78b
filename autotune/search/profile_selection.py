"""The last stages of a search: finalists, evaluation on held-out prompts, and the profile."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.console import Console
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
from autotune.evaluation.runtime_arms import DecoderArm, HuggingFaceArm, RuntimeArms
from autotune.evaluation.summary import ms_per_token
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.replay.draws import time_draws
from autotune.replay.evaluator import Candidate, Evaluator
from autotune.runtime.load import decoder_for
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
from autotune.search.model_pool import ModelPool
from autotune.search.plan import KeptPrompts, StageClock
from autotune.search.tree_search import TreeSearchResult
from autotune.search.tuning_prompts import TuningPrompts, speedup_interval
from autotune.study.storage import RUNS
from autotune.workloads.workload import Workload


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
        self.arms = self.model_pool.arms(table)
        context = [self.model_pool.key, (table.threads, table.prefill_threads)]
        self.runner = self.arms.runner(self.folder / RUNS, context=context)

    def predicted_profile(self) -> DecodingProfile:
        """The profile for another device, with predictions only."""
        (fastest,) = self.candidates(1)
        chosen = None
        if fastest.speedup >= 1.0:
            chosen = self.evaluator.with_fallback(self.evaluator.evaluate(fastest.configuration)).configuration
        return self.profile_of(self.evaluator.table.device, chosen)

    def measured_profile(self) -> DecodingProfile:
        """The profile for this device, with measurements on held-out prompts."""
        monitor = ContentionMonitor(str(self.model_pool.target.device))
        self.finalists = finalists = self.measure_finalists(self.candidates(thresholds.ROUNDS[0][1]))
        self.prompts = finalists.prompts  # predictions use the updated prices
        self.evaluator = self.prompts.full
        profile = self.profile_of(self.model_pool.device, finalists.winner.configuration)
        profile = self.evaluated(profile, finalists)
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

    def evaluated(self, profile: DecodingProfile, finalists: MeasuredFinalists) -> DecodingProfile:
        """The profile with measurements on the evaluation prompts: its decoder next to the other arms."""
        best_defaults = dict(itertools.islice(finalists.best_defaults.items(), thresholds.MAX_HELD_OUT_DEFAULTS))
        evaluation = self.evaluation(profile, best_defaults)
        print_evaluation(evaluation, self.console)
        shrinkage = shrinkage_of(finalists.winner, evaluation, self.prompts)
        return with_evidence(profile, evaluation, shrinkage, self._plain_point())

    def evaluation(self, profile: DecodingProfile, defaults: Mapping[str, Configuration]) -> Evaluation:
        """Run the profile, plain decoding, Hugging Face and the defaults on held-out prompts until the end of the
        stage. The profile and plain decoding run on as many as the plan has kept time for, if need be without the
        defaults.

        Args:
            defaults: published defaults that may be the best one, the most probable one first. Others are not run where
                replay says, in nine of ten draws, that the profile is faster; they leave when they are significantly
                slower than the fastest. One that is the profile's point has the runs of the profile.
        """
        pool, deadline = self.model_pool, self.clock.deadline_of("evaluation")
        last = configuration_of(profile.point)
        assert last is not None, "a profile that decodes plainly has nothing to compare"
        decoder = decoder_for(profile, pool.target, pool.draft_of(last), processor=pool.processor)
        context = [pool.key, profile.threads, profile.prefill_threads, profile.point.model_dump(mode="json")]
        arms = RuntimeArms(decoder, draft_of=pool.draft_of, keys=pool.answer_keys)
        tuned_to = {name for name, default in defaults.items() if default.key == last.key}
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
        replayed = {**defaults, TUNED: last}
        return Evaluation(
            runs={name: runs[name] for name in configurations},
            configurations=configurations,
            predicted={name: self.evaluator.speedup(configuration) for name, configuration in replayed.items()},
            best_default=min(remaining, key=lambda name: ms_per_token(runs[name]), default=None),
            differences=differences_of(tuned, self.evaluate, measured.runs, deadline),
        )

    def profile_of(self, device: Fingerprint, configuration: Configuration | None) -> DecodingProfile:
        """A profile that is not measured; without a configuration, it decodes plainly."""
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
            point=self._plain_point() if configuration is None else self._predicted_point(configuration),
            evidence=Evidence(configurations_replayed=self.trees.num_replayed),
        )

    def _plain_point(self) -> OperatingPoint:
        evaluator = self.evaluator
        ms, estimated = evaluator.ar_ms_per_token, evaluator.table.estimated
        predicted = Predicted(speedup=1.0, ms_per_token=ms, tokens_per_round=None, estimated=estimated)
        return self.model_pool.point(None).model_copy(update={"predicted": predicted})

    def _predicted_point(self, configuration: Configuration) -> OperatingPoint:
        """The operating point of a configuration, with a prediction for the tuning prompts where replay has one."""
        evaluator, point = self.evaluator, self.model_pool.point(configuration)
        if not evaluator.can_replay(configuration):
            return point
        speed = evaluator.evaluate(configuration).model_dump(include={"speedup", "ms_per_token", "tokens_per_round"})
        interval90 = speedup_interval(evaluator, configuration, other_prompts=True)
        predicted = Predicted(**speed, interval90=interval90, estimated=evaluator.table.estimated)
        return point.model_copy(update={"predicted": predicted})


def _is_slower(configuration: Configuration, than: Configuration, evaluator: Evaluator) -> bool:
    """Whether replay says so in ``CONFIDENCE`` of the draws."""
    ms, than_ms = time_draws(evaluator, [configuration, than])
    return bool((ms > than_ms).mean() > thresholds.CONFIDENCE)
