"""From what replay finds to a decoding profile: finalists run for real, kinds of requests may get points of their own, and
the profile is judged on prompts that tuned nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.condition import Condition
from autotune.documents.configuration import PUBLISHED_DEFAULTS, Configuration, configuration_of
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
from autotune.evaluation.arms import Arm, DecoderArm
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runs import Run, prompt_evidence
from autotune.evaluation.summary import Summary, bootstrap_ratio, summarize
from autotune.runtime.load import decoder_for
from autotune.search.elimination import RISK, eliminate, is_significantly_slower
from autotune.search.evaluator import Candidate, Evaluator
from autotune.search.model_pool import ModelPool
from autotune.search.point_selection import MIN_GAIN, by_prompt_tokens, by_temperature, by_workload, choose_points
from autotune.search.tree_search import TreeSearchResult, choose_finalists
from autotune.study.document import RUNS, Finalist
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import Workload, WorkloadPrompt

NUM_FINALISTS = 6
FINALIST_PROMPTS = 16
FINALISTS_SHARE = 0.3  # of the time that is left
POINT_BLOCK = 4  # prompts of a point between two looks
MIN_PROMPTS = 16  # that judge the profile, however late it is...
DEFAULTS_PROMPTS = 6  # ...of which all published defaults decode so many
NUM_POINT_CANDIDATES = 200  # of the fastest of all prompts, among which points are looked for, beside each task's


@dataclass
class ProfileSelection:
    """What a tree stage has found, and what it takes to tell it apart."""

    found: TreeSearchResult
    model_pool: ModelPool
    table: CostTable
    evaluator: Evaluator
    folder: Path
    """Of the study: real runs are kept in it."""
    tune: Workload
    evaluate: Workload
    seed: int
    deadline: float
    console: Console

    finalists: list[Finalist] = field(default_factory=list, init=False)
    """How they did, once they were measured."""

    def __post_init__(self) -> None:
        self.runner = self.model_pool.runner(self.table.threads, self.folder / RUNS)

    def predicted_profile(self) -> DecodingProfile:
        """For a device that is not here: predictions only."""
        fastest = self.found.fastest[0]
        points = [self._point(Condition(), None)]
        if fastest.speedup >= 1.0:
            points = [self._point(when, self.evaluator.guarded(one)) for when, one in self.points(fastest)]
        return self._profile(self.table.device, points)

    def measured_profile(self) -> DecodingProfile:
        """The finalists decode tuning prompts, the fastest wins; then it and the points beside it are judged on prompts that
        tuned nothing.
        """
        finalists = choose_finalists(self.found.fastest, self.evaluator, NUM_FINALISTS)
        winner = self.measure_finalists([self.evaluator.guarded(c) for c in finalists])
        points = [self._point(when, one) for when, one in self.confirmed(self.points(winner), winner)]
        return self.judge(self._profile(self.model_pool.device, points))

    def measure_finalists(self, finalists: list[Candidate]) -> Candidate:
        """Real runs until one is left or the time is up; ties go to the smaller tree."""
        prompts = Workload(self.tune.name, self.tune.split, self.tune.prompts[:FINALIST_PROMPTS])
        arms = [self.runner.arm(f"finalist {number + 1}", one.configuration) for number, one in enumerate(finalists)]
        of_arm = {arm.name: one for arm, one in zip(arms, finalists, strict=True)}
        with self.console.stage("finalists, measured") as update:
            found = eliminate(
                self.runner,
                arms,
                prompts,
                seed=self.seed,
                deadline=time.monotonic() + FINALISTS_SHARE * (self.deadline - time.monotonic()),
                report=lambda done, of: update(done, of, ""),
            )
        self.finalists = []
        for name, one in of_arm.items():
            runs = found.runs[name]
            summary = summarize(name, runs, found.runs[AR][: len(runs)])
            self.finalists.append(
                Finalist(
                    configuration=one.configuration,
                    predicted_speedup=self._predicted_speedup(one.configuration, len(prompts.prompts), len(runs)),
                    speedup=summary.speedup,
                    ci95=summary.ci95,
                    num_runs=len(runs),
                    is_standing=name in found.standing,
                )
            )
        print_finalists(self.finalists, self.console)
        passes = len(found.runs[AR]) / len(prompts.prompts)
        slower = sum(run.decode_ms for run in found.runs[AR]) / float(
            self.evaluator.ar_ms[: len(prompts.prompts)].sum() * passes
        )
        self.console.say(f"plain decoding took {slower:.2f} of the time that the cost table says")
        times = {name: np.array([run.decode_ms for run in found.runs[name]]) for name in found.standing}
        winner = fastest = found.standing[0]
        for name in found.standing[1:]:
            low, _ = bootstrap_ratio(times[name], times[fastest])
            is_tied = low <= 1.0 and times[name].sum() <= 1.005 * times[fastest].sum()
            if is_tied and of_arm[name].nodes_per_round < of_arm[winner].nodes_per_round:
                winner = name
        return of_arm[winner]

    def _predicted_speedup(self, configuration: Configuration, num_prompts: int, num_runs: int) -> float:
        """On as many of the tuning prompts as were run, over and over. Of speedups, not of times: a machine that has become
        slower since its table was measured is slower with and without a draft.
        """
        order = np.arange(num_runs) % num_prompts
        return float(self.evaluator.ar_ms[order].sum() / self.evaluator.replay(configuration).decode_ms[order].sum())

    def points(self, winner: Candidate) -> list[tuple[Condition, Candidate]]:
        """Conditions under which another candidate is predicted to be faster than the winner, on tuning prompts that did not
        choose it; the winner last.
        """
        known = [winner, *self.found.fastest[:NUM_POINT_CANDIDATES], *itertools.chain(*self.found.of_task.values())]
        chosen_among = list({one.key: one for one in known}.values())
        trace = next(iter(self.evaluator.traces.values()))
        points = choose_points(
            self.evaluator.prompt_ms([one.configuration for one in chosen_among]),
            [
                by_workload(self.evaluator.tasks),
                by_temperature([prompt.settings.temperature or 0.0 for prompt in self.tune.prompts]),
                *by_prompt_tokens(trace.prompt_length.tolist()),
            ],
            common=0,  # the winner
            seed=self.seed,
        )
        return [(point.condition, chosen_among[point.configuration]) for point in points]

    def confirmed(
        self, points: list[tuple[Condition, Candidate]], winner: Candidate
    ) -> list[tuple[Condition, Candidate]]:
        """Those points that are faster than the winner in real runs of the tuning prompts that meet their conditions."""
        kept: list[tuple[Condition, Candidate]] = []
        for condition, candidate in points[:-1]:
            own = self.evaluator.guarded(candidate)
            if own.key == winner.key:
                continue
            met = tuple(prompt for prompt in self.tune.prompts if self._meets(condition, prompt))
            arms = [self.runner.arm("winner", winner.configuration), self.runner.arm("point", own.configuration)]
            ms = {arm.name: np.zeros(0) for arm in arms}
            for begin in range(0, len(met), POINT_BLOCK):
                prompts = Workload(self.tune.name, self.tune.split, met[begin : begin + POINT_BLOCK])
                runs = self.runner.compare(
                    arms, prompts, seed=self.seed + begin, min_prompts=POINT_BLOCK, keep_memory=begin > 0
                )
                ms = {name: np.append(ms[name], [run.decode_ms for run in runs[name]]) for name in ms}
                if any(is_significantly_slower(ms[a], ms[b], risk=RISK) for a, b in itertools.permutations(ms)):
                    break
            share = float(ms["point"].sum() / ms["winner"].sum())
            is_faster = share <= 1 - MIN_GAIN
            self.console.say(
                f"for {condition.label}: {own.configuration.label} takes {share:.2f} of the winner's time on "
                f"{len(ms['point'])} tuning prompts: {'a point of its own' if is_faster else 'left out'}"
            )
            if is_faster:
                kept.append((condition, own))
        return [*kept, (Condition(), winner)]

    def _meets(self, condition: Condition, prompt: WorkloadPrompt) -> bool:
        settings = prompt.settings
        length = prompt.inputs(self.model_pool.processor)["input_ids"].shape[1]
        return condition.matches(temperature=settings.temperature or 0.0, prompt_tokens=length, workload=settings.task)

    def judge(self, document: DecodingProfile) -> DecodingProfile:
        """The profile's own decoder, published defaults and plain decoding on the evaluation prompts; returns the profile with
        what came out.
        """
        model_pool, evaluator = self.model_pool, self.evaluator
        decoder = decoder_for(
            document,
            model_pool.target,
            lambda choice: model_pool.draft(choice.id, choice.subnet),
            processor=model_pool.processor,
            threads=document.threads,
        )
        runner = ArmRunner(
            decoder,
            model_pool.processor,
            ledger=self.folder / RUNS,
            context=[model_pool.key, document.threads, [point.model_dump(mode="json") for point in document.points]],
            draft_of=self.runner.draft_of,
        )
        overall = configuration_of(document.point)
        tuned = DecoderArm(TUNED, decoder, key=overall.key if overall else TUNED)
        defaults = self._defaults()
        configurations = {AR: None, **defaults, TUNED: overall}
        runs = self._evaluated(runner, tuned, [runner.arm(name, default) for name, default in defaults.items()])
        summaries = {name: summarize(name, own, runs[AR][: len(own)]) for name, own in runs.items()}
        predicted = {
            name: evaluator.evaluate(configuration)
            for name, configuration in configurations.items()
            if configuration is not None and evaluator.can_replay(configuration)
        }
        labels = {name: one.label for name, one in configurations.items() if one is not None}
        if len(document.points) > 1:
            labels[TUNED] = f"{len(document.points)} points"
            del predicted[TUNED]
        print_comparison(summaries, predicted, labels, self.console)
        is_plain = summaries[TUNED].speedup < 1.0
        decoded = runs[AR if is_plain else TUNED]
        evidence = document.evidence.model_copy(
            update={
                "prompts": [prompt_evidence(run, plain) for run, plain in zip(decoded, runs[AR], strict=True)],
                "compared": [
                    _compared(
                        name,
                        configuration,
                        predicted[name].speedup if name in predicted else None,
                        summaries[name],
                    )
                    for name, configuration in configurations.items()
                ],
            }
        )
        if is_plain:
            self.console.say("plain decoding beats what was tuned: the profile says to decode without a draft")
            plain = self._point(Condition(), None).model_copy(
                update={"measured": _measured(summaries[AR], summaries[AR])}
            )
            return document.model_copy(update={"points": [plain], "evidence": evidence})
        points = []
        for number, point in enumerate(document.points):
            by_it = [i for i, run in enumerate(decoded) if run.point == number]
            measured = None
            if any(decoded[i].new_tokens > 1 for i in by_it):
                tuned_runs, plain_runs = ([runs[name][i] for i in by_it] for name in (TUNED, AR))
                own = summarize(TUNED, tuned_runs, plain_runs)
                measured = _measured(own, summarize(AR, plain_runs, plain_runs))
            points.append(point.model_copy(update={"measured": measured}))
        return document.model_copy(update={"points": points, "evidence": evidence})

    def _evaluated(self, runner: ArmRunner, tuned: Arm, defaults: Sequence[Arm]) -> dict[str, list[Run]]:
        """Runs of plain decoding, the published defaults and the profile, by arm name. All of them decode the first prompts;
        the others, as many as there is time for, only the fastest of the defaults beside the profile.
        """
        prompts = self.evaluate.prompts
        with self.console.stage("evaluation, measured") as update:

            def compare(arms: Sequence[Arm], begin: int, end: int, **options: Any) -> dict[str, list[Run]]:
                def report(done: int, _: int) -> None:
                    update(begin + done, len(prompts), "")

                part = Workload(self.evaluate.name, self.evaluate.split, prompts[begin:end])
                return runner.compare(arms, part, seed=self.seed + 1 + begin, report=report, **options)

            runs = compare([runner.plain, *defaults, tuned], 0, DEFAULTS_PROMPTS, min_prompts=DEFAULTS_PROMPTS)
            fastest = min(defaults, key=lambda arm: sum(run.decode_ms for run in runs[arm.name]))
            left = compare(
                [runner.plain, fastest, tuned],
                DEFAULTS_PROMPTS,
                len(prompts),
                deadline=self.deadline,
                min_prompts=MIN_PROMPTS - DEFAULTS_PROMPTS,
                keep_memory=True,
            )
        return {name: [*own, *left.get(name, ())] for name, own in runs.items()}

    def _defaults(self) -> dict[str, Configuration]:
        """What users run today, each with a draft of the paper's own kind where there is one."""
        of_kind = {self.model_pool.kind(draft): draft for draft in reversed(self.model_pool.references)}
        first = next(iter(self.model_pool.references))
        return {
            name: default.model_copy(update={"draft": of_kind.get(name, of_kind.get("independent", first))})
            for name, default in PUBLISHED_DEFAULTS.items()
        }

    def _point(self, condition: Condition, candidate: Candidate | None) -> OperatingPoint:
        """Not measured yet; without a candidate it is plain decoding."""
        if candidate is None:
            plain = Predicted(speedup=1.0, ms_per_token=self.evaluator.ar_ms_per_token, tokens_per_round=None)
            return OperatingPoint(when=condition, draft=None, tree=None, predicted=plain, measured=None)
        c = candidate.configuration
        reference = self.model_pool.references[c.draft or ""]
        return OperatingPoint(
            when=condition,
            draft=DraftChoice(
                kind=self.model_pool.kind(reference.id), id=reference.id, sha256=reference.sha256, subnet=c.subnet
            ),
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
            evidence=Evidence(configurations_replayed=self.found.num_replayed),
        )


def _compared(
    name: str, configuration: Configuration | None, predicted_speedup: float | None, summary: Summary
) -> ComparedArm:
    return ComparedArm(
        name=name,
        tree=configuration.tree if configuration else None,
        visual_keep=configuration.visual_keep if configuration else None,
        predicted_speedup=predicted_speedup,
        speedup=summary.speedup,
        ci95=summary.ci95,
        tokens_per_round=summary.tokens_per_round,
        tokens_per_second=summary.tokens_per_second,
        num_prompts=summary.num_prompts,
    )


def _measured(summary: Summary, plain: Summary) -> Measured:
    return Measured(
        speedup=summary.speedup,
        ci95=summary.ci95,
        tokens_per_round=None if summary is plain else summary.tokens_per_round,
        tokens_per_second=summary.tokens_per_second,
        ar_tokens_per_second=plain.tokens_per_second,
        num_prompts=summary.num_prompts,
        num_tokens=summary.num_tokens,
        identical_outputs=summary.identical_outputs,
    )


def print_finalists(finalists: Sequence[Finalist], console: Console) -> None:
    """Predicted beside measured."""
    rows = [
        [
            one.configuration.label,
            f"{one.predicted_speedup:.2f}x",
            f"{one.speedup:.2f}x",
            f"{one.ci95[0]:.2f}-{one.ci95[1]:.2f}",
            f"{100 * one.prediction_error:+.1f} %",
            f"{one.num_runs}" + ("" if one.is_standing else ", then out"),
        ]
        for one in finalists
    ]
    console.table(
        "Finalists on tuning prompts",
        ["configuration", "predicted", "measured", "95 % interval", "prediction off by", "runs"],
        rows,
    )


def print_comparison(
    summaries: dict[str, Summary], predicted: dict[str, Candidate], labels: dict[str, str], console: Console
) -> None:
    """The final table: plain decoding, published defaults, winner; predicted beside measured."""
    rows = []
    for name, summary in summaries.items():
        label = f"{name}: {labels[name]}" if name in labels else "plain decoding (ar)"
        rows.append(
            [
                label,
                f"{predicted[name].speedup:.2f}x" if name in predicted else "-",
                f"{summary.speedup:.2f}x",
                f"{summary.ci95[0]:.2f}-{summary.ci95[1]:.2f}",
                f"{summary.tokens_per_round:.2f}" if summary.tokens_per_round else "-",
                f"{summary.tokens_per_second:.0f}",
                f"{summary.identical_outputs}/{summary.num_prompts}",
            ]
        )
    first = next(iter(summaries.values()))  # on all prompts
    title = f"Evaluation on {first.num_prompts} held-out prompts, {first.num_tokens} tokens"
    console.table(
        title,
        ["arm", "predicted", "measured", "95 % interval", "M", "tokens/s", "same output"],
        rows,
        emphasised=len(rows) - 1,
    )
