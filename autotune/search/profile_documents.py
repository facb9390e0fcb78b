"""Decoding profiles from the results of a search: operating points with predictions, then with measurements and evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from autotune.documents.condition import Condition
from autotune.documents.configuration import Configuration
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
from autotune.documents.run import Run, prompt_evidence
from autotune.evaluation.summary import Summary, summarize
from autotune.search.held_out import Evaluation
from autotune.search.model_pool import ModelPool
from autotune.search.tuning_prompts import TuningPrompts, speedup_interval
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import Workload

D = TypeVar("D", ComparedArm, Measured)


@dataclass(frozen=True)
class ProfileDocuments:
    """Makes the documents of one search's profile."""

    model_pool: ModelPool
    prompts: TuningPrompts
    evaluate: Workload
    configurations_replayed: int

    def predicted(self, device: Fingerprint, points: Sequence[tuple[Condition, Configuration]]) -> DecodingProfile:
        """A profile of operating points that are not measured; without any, it decodes plainly."""
        table, tune = self.prompts.full.table, self.prompts.workload
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
            precision=table.precision,
            capture_sizes=table.capture_sizes,
            mode=table.mode,
            attention_backends=table.attention_backends,
            threads=table.threads,
            prefill_threads=table.prefill_threads,
            points=[self._point(condition, c) for condition, c in points] or [self._plain_point()],
            evidence=Evidence(configurations_replayed=self.configurations_replayed),
        )

    def measured(
        self, profile: DecodingProfile, evaluation: Evaluation, shrinkage: Shrinkage | None
    ) -> DecodingProfile:
        """The profile with its measured points and its evidence; it decodes plainly where that is faster."""
        runs, summaries = evaluation.runs, evaluation.summaries
        is_faster = summaries[TUNED].speedup >= 1.0
        if is_faster:
            points = [
                point.model_copy(update={"measured": measured_point(number, runs[TUNED], runs[AR])})
                for number, point in enumerate(profile.points)
            ]
        else:
            points = [self._plain_point().model_copy(update={"measured": _measured(summaries[AR], summaries[AR])})]
        compared = [
            _from_summary(
                ComparedArm,
                summaries[name],
                tree=configuration.tree if configuration else None,
                visual_keep=configuration.visual_keep if configuration else None,
                predicted_speedup=evaluation.predicted.get(name),
            )
            for name, configuration in evaluation.configurations.items()
        ]
        decoded = runs[TUNED] if is_faster else runs[AR]  # checks compare with what the profile decodes
        evidence = profile.evidence.model_copy(
            update={
                "prompts": [prompt_evidence(run, plain) for run, plain in zip(decoded, runs[AR], strict=True)],
                "compared": compared,
                "best_default": evaluation.best_default,
                "gains": evaluation.gains,
                "shrinkage": shrinkage,
            }
        )
        return profile.model_copy(update={"points": points, "evidence": evidence})

    def _plain_point(self) -> OperatingPoint:
        evaluator = self.prompts.full
        ms, estimated = evaluator.ar_ms_per_token, evaluator.table.estimated
        predicted = Predicted(speedup=1.0, ms_per_token=ms, tokens_per_round=None, estimated=estimated)
        return OperatingPoint(when=Condition(), draft=None, tree=None, predicted=predicted, measured=None)

    def _point(self, condition: Condition, configuration: Configuration) -> OperatingPoint:
        """An operating point that is not measured yet."""
        evaluator, c = self.prompts.full, configuration
        reference = self.model_pool.references[c.draft or ""]
        predicted = None
        if evaluator.can_replay(c):
            candidate = evaluator.evaluate(c)
            predicted = Predicted(
                speedup=candidate.speedup,
                ms_per_token=candidate.ms_per_token,
                tokens_per_round=candidate.tokens_per_round,
                interval90=speedup_interval(evaluator, c, other_prompts=True),
                estimated=evaluator.table.estimated,
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


def shrinkage_of(
    winner: Configuration,
    measured_on_confirming: float,
    evaluation: Evaluation,
    num_points: int,
    prompts: TuningPrompts,
) -> Shrinkage:
    """How the winner's speedup shrank from the prompts that chose it to those that did not.

    Args:
        winner: the configuration of the last of ``num_points`` operating points.
        measured_on_confirming: its speedup in the race of finalists.
    """
    choosing, confirming = (
        evaluator.evaluate(winner).speedup if evaluator.can_replay(winner) else None
        for evaluator in (prompts.choosing, prompts.confirming)
    )
    pairs = list(zip(evaluation.runs[TUNED], evaluation.runs[AR], strict=True))
    winner_pairs = [pair for pair in pairs if pair[0].point == num_points - 1]  # without the prompts of other points
    return Shrinkage(
        predicted_on_choosing=choosing,
        predicted_on_confirming=confirming,
        measured_on_confirming=measured_on_confirming,
        measured_on_held_out=summarize(TUNED, *map(list, zip(*(winner_pairs or pairs), strict=True))).speedup,
    )


def measured_point(number: int, runs: Sequence[Run], plain: Sequence[Run]) -> Measured | None:
    """Measurements of an operating point on the prompts that it decoded; None where it decoded nothing."""
    pairs = [(run, plain_run) for run, plain_run in zip(runs, plain, strict=True) if number == run.point]
    if not any(run.new_tokens > 1 for run, _ in pairs):
        return None
    point_runs, plain_runs = zip(*pairs, strict=True)
    return _measured(summarize(TUNED, point_runs, plain_runs), summarize(AR, plain_runs, plain_runs))


def _measured(summary: Summary, plain: Summary) -> Measured:
    tokens_per_round = None if summary is plain else summary.tokens_per_round
    further = {"tokens_per_round": tokens_per_round, "ar_tokens_per_second": plain.tokens_per_second}
    return _from_summary(Measured, summary, **further)


def _from_summary(document: type[D], summary: Summary, **further: Any) -> D:
    """A document with the fields of a summary that have the same names, and ``others``."""
    shared = {name: value for name, value in vars(summary).items() if name in document.model_fields}
    return document(**{**shared, **further})
