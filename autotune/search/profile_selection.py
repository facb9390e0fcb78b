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
    WorkloadReference,
)
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import stamp
from autotune.documents.published_defaults import COMPARED_DEFAULTS
from autotune.evaluation.arms import Arm, DecoderArm
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runs import Run, prompt_evidence
from autotune.evaluation.summary import Summary, summarize
from autotune.runtime.load import decoder_for
from autotune.search.elimination import RISK, is_significantly_slower
from autotune.search.evaluator import Candidate, Evaluator
from autotune.search.finalists import choose_finalists, measure_finalists, print_labels
from autotune.search.model_pool import ModelPool
from autotune.search.point_selection import MIN_GAIN, by_prompt_tokens, by_temperature, by_workload, choose_points
from autotune.search.tree_search import TreeSearchResult
from autotune.study.document import RUNS, Finalist
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import Workload, WorkloadPrompt

D = TypeVar("D", ComparedArm, Measured)

NUM_FINALISTS = 6
NUM_FINALIST_PROMPTS = 16
FINALISTS_SHARE = 0.3  # of the time left
NUM_POINT_CANDIDATES = 200  # fastest configurations over all prompts, beside the fastest of each task
POINT_PROMPTS = 4  # of an operating point between two interim analyses
MIN_EVALUATED_PROMPTS = 16  # even past the deadline
NUM_DEFAULTS_PROMPTS = 6  # decoded by all compared defaults; only the fastest default decodes the others


@dataclass
class ProfileSelection:
    """Makes a decoding profile from the result of a tree search."""

    trees: TreeSearchResult
    model_pool: ModelPool
    evaluator: Evaluator
    folder: Path
    """The study's folder, which keeps the runs."""
    tune: Workload
    evaluate: Workload
    seed: int
    deadline: float
    """A value of ``time.monotonic``."""
    console: Console

    finalists: list[Finalist] = field(default_factory=list, init=False)
    """Set by ``measure_finalists``."""

    def __post_init__(self) -> None:
        self.table = self.evaluator.table
        self.runner = self.model_pool.runner(self.table.threads, self.folder / RUNS)

    def predicted_profile(self) -> DecodingProfile:
        """The profile for another device, with predictions only."""
        fastest = self.trees.fastest[0]
        points = [self._plain_point()]
        if fastest.speedup >= 1.0:
            points = [self._point(when, self.evaluator.with_fallback(c)) for when, c in self.points(fastest)]
        return self._profile(self.table.device, points)

    def measured_profile(self) -> DecodingProfile:
        """The profile for this device, with measurements on held-out prompts."""
        winner = self.measure_finalists(choose_finalists(self.trees.fastest, self.evaluator, NUM_FINALISTS))
        points = self.confirmed(self.points(winner), winner)
        return self.evaluated(self._profile(self.model_pool.device, [self._point(when, c) for when, c in points]))

    def measure_finalists(self, candidates: Sequence[Candidate]) -> Candidate:
        """The fastest candidate on tuning prompts, with its fallback."""
        winner, self.finalists = measure_finalists(
            [self.evaluator.with_fallback(candidate) for candidate in candidates],
            self.runner,
            self.evaluator,
            Workload(self.tune.name, self.tune.split, self.tune.prompts[:NUM_FINALIST_PROMPTS]),
            self.console,
            seed=self.seed,
            deadline=time.monotonic() + FINALISTS_SHARE * (self.deadline - time.monotonic()),
        )
        return winner

    # ----------------------------------------------------------------------------------------------- operating points

    def points(self, winner: Candidate) -> list[tuple[Condition, Candidate]]:
        """Conditions under which another candidate is predicted to be faster than the winner, which is last."""
        fastest = [*self.trees.fastest[:NUM_POINT_CANDIDATES], *itertools.chain(*self.trees.fastest_by_task.values())]
        candidates = list({candidate.key: candidate for candidate in [winner, *fastest]}.values())
        trace = next(iter(self.evaluator.traces.values()))
        points = choose_points(
            self.evaluator.prompt_ms([candidate.configuration for candidate in candidates]),
            [
                by_workload(self.evaluator.tasks),
                by_temperature([prompt.settings.temperature or 0.0 for prompt in self.tune.prompts]),
                *by_prompt_tokens(trace.prompt_length.tolist()),
            ],
            common=0,  # the winner
            seed=self.seed,
        )
        return [(point.condition, candidates[point.configuration]) for point in points]

    def confirmed(
        self, points: list[tuple[Condition, Candidate]], winner: Candidate
    ) -> list[tuple[Condition, Candidate]]:
        """The points that beat the winner in real runs of the tuning prompts that meet their conditions."""
        kept: list[tuple[Condition, Candidate]] = []
        rows: list[list[str]] = []
        labels: dict[str, str] = {}
        for condition, predicted in points[:-1]:
            candidate = self.evaluator.with_fallback(predicted)
            if candidate.key == winner.key:
                continue
            prompts = tuple(prompt for prompt in self.tune.prompts if self._meets(condition, prompt))
            arms = [self.runner.arm("winner", winner.configuration), self.runner.arm("point", candidate.configuration)]
            ms = {arm.name: np.zeros(0) for arm in arms}
            for begin in range(0, len(prompts), POINT_PROMPTS):
                part = Workload(self.tune.name, self.tune.split, prompts[begin : begin + POINT_PROMPTS])
                runs = self.runner.compare(
                    arms, part, seed=self.seed + begin, min_prompts=POINT_PROMPTS, keep_memory=begin > 0
                )
                ms = {name: np.append(ms[name], [run.decode_ms for run in runs[name]]) for name in ms}
                if any(is_significantly_slower(ms[a], ms[b], risk=RISK) for a, b in itertools.permutations(ms)):
                    break
            ratio = float(ms["point"].sum() / ms["winner"].sum())
            is_faster = ratio <= 1 - MIN_GAIN
            name = f"{len(rows) + 1}"
            labels[name] = f"{condition.label}: {candidate.configuration.label}"
            rows.append([name, f"{ratio:.2f}", f"{len(ms['point'])}", "yes" if is_faster else "no"])
            if is_faster:
                kept.append((condition, candidate))
        if rows:
            columns = ["point", "time / winner's time", "prompts", "kept"]
            self.console.table("Operating points on tuning prompts", columns, rows)
            print_labels(labels, self.console)
        return [*kept, (Condition(), winner)]

    def _meets(self, condition: Condition, prompt: WorkloadPrompt) -> bool:
        settings = prompt.settings
        length = prompt.inputs(self.model_pool.processor)["input_ids"].shape[1]
        return condition.matches(temperature=settings.temperature or 0.0, prompt_tokens=length, workload=settings.task)

    # ----------------------------------------------------------------------------------------------------- evaluation

    def evaluated(self, profile: DecodingProfile) -> DecodingProfile:
        """The profile with measurements: its decoder, published defaults and plain decoding on the evaluation prompts."""
        pool = self.model_pool
        decoder = decoder_for(
            profile,
            pool.target,
            lambda choice: pool.draft(choice.id, choice.subnet),
            processor=pool.processor,
            threads=profile.threads,
        )
        runner = ArmRunner(
            decoder,
            pool.processor,
            ledger=self.folder / RUNS,
            context=[pool.key, profile.threads, [point.model_dump(mode="json") for point in profile.points]],
            draft_of=pool.draft_of,
        )
        last = configuration_of(profile.point)
        tuned = DecoderArm(TUNED, decoder, key=last.key if last else TUNED)
        defaults = self._published_defaults()
        runs = self._evaluation_runs(runner, tuned, [runner.arm(name, default) for name, default in defaults.items()])
        summaries = {name: summarize(name, own, runs[AR][: len(own)]) for name, own in runs.items()}
        configurations = {AR: None, **defaults, TUNED: last}
        predicted = {
            name: self.evaluator.evaluate(configuration).speedup
            for name, configuration in configurations.items()
            if configuration is not None and self.evaluator.can_replay(configuration)
        }
        labels = {name: configuration.label for name, configuration in configurations.items() if configuration}
        if len(profile.points) > 1:
            labels[TUNED] = f"{len(profile.points)} operating points"
            predicted.pop(TUNED, None)
        print_comparison(summaries, predicted, labels, self.console)
        is_plain = summaries[TUNED].speedup < 1.0
        decoded = runs[AR if is_plain else TUNED]
        evidence = profile.evidence.model_copy(
            update={
                "prompts": [prompt_evidence(run, plain) for run, plain in zip(decoded, runs[AR], strict=True)],
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
            }
        )
        if is_plain:
            self.console.say(
                "plain decoding is faster than the tuned configuration: the profile decodes without a draft"
            )
            measured = _measured(summaries[AR], summaries[AR])
            points = [self._plain_point().model_copy(update={"measured": measured})]
        else:
            points = [
                point.model_copy(update={"measured": _measured_point(number, decoded, runs[AR])})
                for number, point in enumerate(profile.points)
            ]
        return profile.model_copy(update={"points": points, "evidence": evidence})

    def _evaluation_runs(self, runner: ArmRunner, tuned: Arm, defaults: Sequence[Arm]) -> dict[str, list[Run]]:
        """Runs by arm name. All arms decode the first prompts; plain decoding, the fastest default and the profile decode
        as many of the others as there is time for.
        """
        prompts = self.evaluate.prompts
        with self.console.stage("evaluation, measured") as update:

            def compare(arms: Sequence[Arm], begin: int, end: int, **options: Any) -> dict[str, list[Run]]:
                def report(done: int, _: int) -> None:
                    update(begin + done, len(prompts), "")

                part = Workload(self.evaluate.name, self.evaluate.split, prompts[begin:end])
                return runner.compare(arms, part, seed=self.seed + 1 + begin, report=report, **options)

            first = NUM_DEFAULTS_PROMPTS
            runs = compare([runner.plain, *defaults, tuned], 0, first, min_prompts=first)
            fastest = min(defaults, key=lambda arm: sum(run.decode_ms for run in runs[arm.name]))
            more = compare(
                [runner.plain, fastest, tuned],
                first,
                len(prompts),
                deadline=self.deadline,
                min_prompts=MIN_EVALUATED_PROMPTS - first,
                keep_memory=True,
            )
        return {name: [*own, *more.get(name, ())] for name, own in runs.items()}

    def _published_defaults(self) -> dict[str, Configuration]:
        """The published defaults to compare with, each with a draft of its paper's kind where there is one."""
        by_kind = {self.model_pool.kind(draft): draft for draft in reversed(self.model_pool.references)}
        first = next(iter(self.model_pool.references))
        return {
            name: default.model_copy(update={"draft": by_kind.get(name, by_kind.get("independent", first))})
            for name, default in COMPARED_DEFAULTS.items()
        }

    # -------------------------------------------------------------------------------------------------------- profile

    def _plain_point(self) -> OperatingPoint:
        ms, estimated = self.evaluator.ar_ms_per_token, self.table.estimated
        predicted = Predicted(speedup=1.0, ms_per_token=ms, tokens_per_round=None, estimated=estimated)
        return OperatingPoint(when=Condition(), draft=None, tree=None, predicted=predicted, measured=None)

    def _point(self, condition: Condition, candidate: Candidate) -> OperatingPoint:
        """An operating point that is not measured yet."""
        c = candidate.configuration
        reference = self.model_pool.references[c.draft or ""]
        kind = self.model_pool.kind(reference.id)
        return OperatingPoint(
            when=condition,
            draft=DraftChoice(kind=kind, id=reference.id, sha256=reference.sha256, subnet=c.subnet),
            tree=parse_policy(c.tree),
            fallback=c.fallback,
            predicted=Predicted(
                speedup=candidate.speedup,
                ms_per_token=candidate.ms_per_token,
                tokens_per_round=candidate.tokens_per_round,
                estimated=self.table.estimated,
            ),
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
            threads=self.table.threads,
            points=points,
            evidence=Evidence(configurations_replayed=self.trees.num_replayed),
        )


def _from_summary(document: type[D], summary: Summary, **others: Any) -> D:
    """A document with the fields of a summary that have the same names, and ``others``."""
    shared = {name: value for name, value in vars(summary).items() if name in document.model_fields}
    return document(**{**shared, **others})


def _measured_point(number: int, runs: Sequence[Run], plain: Sequence[Run]) -> Measured | None:
    """Measurements of an operating point on the prompts that it decoded; None where it decoded nothing."""
    pairs = [(run, plain_run) for run, plain_run in zip(runs, plain, strict=True) if run.point == number]
    if not any(run.new_tokens > 1 for run, _ in pairs):
        return None
    own_runs, plain_runs = zip(*pairs, strict=True)
    return _measured(summarize(TUNED, own_runs, plain_runs), summarize(AR, plain_runs, plain_runs))


def _measured(summary: Summary, plain: Summary) -> Measured:
    tokens_per_round = None if summary is plain else summary.tokens_per_round
    others = {"tokens_per_round": tokens_per_round, "ar_tokens_per_second": plain.tokens_per_second}
    return _from_summary(Measured, summary, **others)


def print_comparison(
    summaries: Mapping[str, Summary], predicted: Mapping[str, float], labels: Mapping[str, str], console: Console
) -> None:
    """Print plain decoding, published defaults and the profile, and their configurations below the table."""
    rows = [
        [
            name,
            f"{predicted[name]:.2f}x" if name in predicted else "-",
            f"{summary.speedup:.2f}x",
            f"{summary.ci95[0]:.2f}-{summary.ci95[1]:.2f}",
            f"{summary.tokens_per_round:.2f}" if summary.tokens_per_round else "-",
            f"{summary.tokens_per_second:.0f}",
            f"{summary.identical_outputs}/{summary.num_prompts}",
        ]
        for name, summary in summaries.items()
    ]
    plain = summaries[AR]
    console.table(
        f"Evaluation on {plain.num_prompts} held-out prompts, {plain.num_tokens} tokens",
        ["arm", "predicted", "measured", "95 % CI", "M", "tokens/s", "same output"],
        rows,
        emphasised=len(rows) - 1,
    )
    print_labels(labels, console)
