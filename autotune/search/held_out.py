"""The evaluation on held-out prompts: what its runs say, and the evidence that the profile gets from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded, prompt_evidence
from autotune.documents.decoding_profile import (
    ALL,
    AR,
    HF,
    TUNED,
    ComparedArm,
    DecodingProfile,
    Differences,
    Gain,
    Measured,
    OperatingPoint,
    Shrinkage,
)
from autotune.evaluation.bench_tables import ARM_COLUMNS, ARM_NOTES
from autotune.evaluation.divergence import divergences_from_plain
from autotune.evaluation.runtime_arms import DecoderArm
from autotune.evaluation.summary import Summary, summarize
from autotune.search.tuning_prompts import TuningPrompts
from autotune.study.document import MeasuredConfiguration
from autotune.workloads.workload import Workload

D = TypeVar("D", ComparedArm, Gain, Measured)


@dataclass(frozen=True)
class Evaluation:
    """Runs of a profile and of the arms compared with it on held-out prompts."""

    runs: Mapping[str, Sequence[Decoded]]
    """Runs by arm name, the profile last."""
    configurations: Mapping[str, Configuration | None]
    """The configuration of every arm, the last operating point for the profile; None for arms without one."""
    predicted: Mapping[str, float | None]
    """Speedups of the arms that can be replayed. A profile of several operating points has none."""
    best_default: str | None
    """The default that was fastest."""
    differences: Differences = field(default_factory=Differences)

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        return {name: summarize(name, runs, self.runs[AR][: len(runs)]) for name, runs in self.runs.items()}

    @cached_property
    def gains(self) -> list[Gain]:
        """The speedup of the profile over plain decoding, Hugging Face and the best default, by task and over all
        prompts.
        """
        gains = []
        for over in filter(None, (AR, HF, self.best_default)):
            pairs = list(zip(self.runs[TUNED], self.runs[over], strict=False))  # some arms have fewer runs
            tasks = list(dict.fromkeys(run.task or "" for run, _ in pairs))
            for task in (*(tasks if len(tasks) > 1 else ()), ALL):
                of_task = [pair for pair in pairs if task in (ALL, pair[0].task)]
                if any(run.new_tokens > 1 and base.new_tokens > 1 for run, base in of_task):  # else nothing was decoded
                    summary = summarize(TUNED, *map(list, zip(*of_task, strict=True)))
                    gains.append(_from_summary(Gain, summary, task=task, over=over))
        return gains


def differences_of(
    tuned: DecoderArm, workload: Workload, runs: Mapping[str, Sequence[Decoded]], deadline: float
) -> Differences:
    """Examine the answers of the profile that differ from plain decoding, until ``deadline`` of ``time.monotonic``."""
    num = sum(a.tokens_sha256 != b.tokens_sha256 for a, b in zip(runs[tuned.name], runs[AR], strict=True))
    decoded = tuned.arms.conversations.follow_all(workload.prompts[: len(runs[tuned.name]) if num else 0])
    longest_s = max(run.target_prefill_ms + run.decode_ms for run in runs[AR]) / 1e3  # an examination decodes plainly
    found = divergences_from_plain(tuned, decoded, runs[tuned.name], runs[AR], deadline - longest_s)
    is_exact = tuned.decoder.target.text.is_exact
    other = [f"{prompt}: {one}" for prompt, one in found.items() if is_exact or not one.is_near_tie]
    return Differences(rounding=len(found) - len(other), other=other, unexamined=num - len(found))


def print_evaluation(evaluation: Evaluation, num_points: int, console: Console) -> None:
    """Print every arm's figures, the configurations below the table, and what tuning gained, by task."""
    columns, rows = ("speedup", "M", "tokens/s", "same output"), []
    for name, summary in evaluation.summaries.items():
        predicted = evaluation.predicted.get(name)
        prediction = "-" if predicted is None else f"{predicted:.2f}x"
        rows.append([name, prediction, *(ARM_COLUMNS[column](summary) for column in columns)])
    plain, header = evaluation.summaries[AR], ["arm", "predicted", "measured", *columns[1:]]
    title = f"Evaluation on {plain.num_prompts} held-out prompts, {plain.num_tokens} tokens, with 95 % intervals"
    console.table(title, header, rows, emphasised=len(rows) - 1)
    found = evaluation.differences
    if num := found.rounding + len(found.other) + found.unexamined:
        parts = f"{found.rounding} by rounding alone, after near ties; {len(found.other)} for another reason"
        late = f"; {found.unexamined} not examined within the budget" if found.unexamined else ""
        console.say(f"{num} outputs of {TUNED} differ from plain decoding: {parts}{late}")
    for difference in found.other:
        console.say(f"  {difference}")
    labels = {name: note for name, note in ARM_NOTES.items() if name in [*columns, *evaluation.summaries]}
    labels |= {name: configuration.label for name, configuration in evaluation.configurations.items() if configuration}
    console.labels(labels | ({TUNED: f"{num_points} operating points"} if num_points > 1 else {}))
    _print_gains(evaluation.gains, evaluation.best_default, console)


def _print_gains(gains: Sequence[Gain], best_default: str | None, console: Console) -> None:
    """Print what tuning gained, by task, with 95 % intervals."""
    over = {AR: "over plain decoding", HF: "over Hugging Face", best_default: f"over {best_default}, the best default"}
    columns = [name for name in over if any(gain.over == name for gain in gains)]
    by_cell = {(gain.task, gain.over): gain for gain in gains}
    rows = []
    for task in dict.fromkeys(gain.task for gain in gains):
        cells = [by_cell.get((task, name or "")) for name in columns]
        texts = ["-" if g is None else f"{g.speedup:.2f}x ({g.ci95[0]:.2f}-{g.ci95[1]:.2f})" for g in cells]
        rows.append([f"{task} ({max(g.num_prompts for g in cells if g is not None)})", *texts])
    title = "What tuning gained on held-out prompts, with 95 % intervals"
    console.table(title, ["task (prompts)", *(over[name] for name in columns)], rows, emphasised=len(rows) - 1)


def with_evidence(
    profile: DecodingProfile, evaluation: Evaluation, shrinkage: Shrinkage, plain_point: OperatingPoint
) -> DecodingProfile:
    """The profile with its measured points and its evidence; it decodes plainly, by ``plain_point``, where that is
    faster.
    """
    runs, summaries = evaluation.runs, evaluation.summaries
    is_faster = summaries[TUNED].speedup >= 1.0
    points = [plain_point.model_copy(update={"measured": _measured(summaries[AR], summaries[AR])})]
    if is_faster:
        measured = [measured_point(number, runs[TUNED], runs[AR]) for number in range(len(profile.points))]
        points = [p.model_copy(update={"measured": m}) for p, m in zip(profile.points, measured, strict=True)]
    compared = []
    for name, c in evaluation.configurations.items():
        known = {"tree": c and c.tree, "visual_keep": c and c.visual_keep}
        predicted = evaluation.predicted.get(name)
        compared.append(_from_summary(ComparedArm, summaries[name], predicted_speedup=predicted, **known))
    decoded = runs[TUNED] if is_faster else runs[AR]  # checks compare with what the profile decodes
    evidence = profile.evidence.model_copy(
        update={
            "prompts": [prompt_evidence(run, plain) for run, plain in zip(decoded, runs[AR], strict=True)],
            "compared": compared,
            "best_default": evaluation.best_default,
            "gains": evaluation.gains,
            "shrinkage": shrinkage,
            "differences": evaluation.differences if is_faster else None,
        }
    )
    return profile.model_copy(update={"points": points, "evidence": evidence})


def shrinkage_of(
    winner: MeasuredConfiguration, evaluation: Evaluation, num_points: int, prompts: TuningPrompts
) -> Shrinkage:
    """How the speedup of the winner, the last of ``num_points`` operating points, shrank from the prompts that chose it
    to those that did not.
    """
    pairs = list(zip(evaluation.runs[TUNED], evaluation.runs[AR], strict=True))
    winner_pairs = [pair for pair in pairs if pair[0].point == num_points - 1]  # without the prompts of other points
    return Shrinkage(
        predicted_on_choosing=prompts.choosing.speedup(winner.configuration),
        predicted_on_confirming=prompts.confirming.speedup(winner.configuration),
        measured_on_confirming=winner.speedup,
        num_runs=winner.num_runs,
        measured_on_held_out=summarize(TUNED, *map(list, zip(*(winner_pairs or pairs), strict=True))).speedup,
    )


def measured_point(number: int, runs: Sequence[Decoded], plain: Sequence[Decoded]) -> Measured | None:
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
    """A document with the fields of a summary that have the same names, and ``further`` ones."""
    shared = {name: value for name, value in vars(summary).items() if name in document.model_fields}
    return document(**{**shared, **further})
