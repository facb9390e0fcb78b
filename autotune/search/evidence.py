"""The evidence that a profile gets from runs on held-out prompts, of the runtime and of engines. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import ALL, AR, HF, TUNED, ComparedArm, Differences, Gain, Measured
from autotune.evaluation.bench_tables import ARM_COLUMNS, ARM_NOTES
from autotune.evaluation.summary import Summary, summarize

D = TypeVar("D", ComparedArm, Gain, Measured)


@dataclass(frozen=True)
class Evaluation:
    """Runs of a tuned arm and of the arms compared with it on held-out prompts."""

    runs: Mapping[str, Sequence[Decoded]]
    """Runs by arm name, the tuned arm last."""
    configurations: Mapping[str, Any]
    """The configuration of every arm, the operating point for a profile; None for arms without one."""
    predicted: Mapping[str, float | None]
    """Speedups of the arms that can be replayed."""
    best_default: str | None
    """The default that was fastest."""
    differences: Differences = field(default_factory=Differences)
    tuned: str = TUNED
    """Name of the tuned arm."""

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        return {name: summarize(name, runs, self.runs[AR][: len(runs)]) for name, runs in self.runs.items()}

    @cached_property
    def gains(self) -> list[Gain]:
        """The speedup of the tuned arm over plain decoding, Hugging Face and the best default, by task and over all
        prompts.
        """
        gains = []
        for over in filter(None, (AR, HF if HF in self.runs else None, self.best_default)):
            pairs = list(zip(self.runs[self.tuned], self.runs[over], strict=False))  # some arms have fewer runs
            tasks = list(dict.fromkeys(run.task or "" for run, _ in pairs))
            for task in (*(tasks if len(tasks) > 1 else ()), ALL):
                of_task = [pair for pair in pairs if task in (ALL, pair[0].task)]
                if any(run.new_tokens > 1 and base.new_tokens > 1 for run, base in of_task):  # else nothing was decoded
                    summary = summarize(self.tuned, *map(list, zip(*of_task, strict=True)))
                    gains.append(_from_summary(Gain, summary, task=task, over=over))
        return gains

    def evidence(self, decoded: str) -> dict[str, Any]:
        """Fields of a profile's evidence. Checks compare with the runs of ``decoded``, the arm that the profile decodes
        with.
        """
        compared = []
        for name, c in self.configurations.items():
            known = {"tree": c.tree, "visual_keep": c.visual_keep} if isinstance(c, Configuration) else {}
            known = {"tree": None, "visual_keep": None, "predicted_speedup": self.predicted.get(name), **known}
            compared.append(_from_summary(ComparedArm, self.summaries[name], **known))
        return {
            "prompts": [run.without_tokens() for run in self.runs[decoded]],
            "plain_ms": [run.decode_ms for run in self.runs[AR]],
            "compared": compared,
            "best_default": self.best_default,
            "gains": self.gains,
        }

    def measured(self, decoded: str) -> Measured:
        """The measurement of an arm on all prompts that it decoded."""
        return _measured(self.summaries[decoded], self.summaries[AR])


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
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
        console.say(f"{num} outputs of {evaluation.tuned} differ from plain decoding: {parts}{late}")
    for difference in found.other:
        console.say(f"  {difference}")
    labels = {name: note for name, note in ARM_NOTES.items() if name in [*columns, *evaluation.summaries]}
    labels |= {name: c.label for name, c in evaluation.configurations.items() if c is not None and c.label != name}
    console.labels(labels)
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


def _measured(summary: Summary, plain: Summary) -> Measured:
    tokens_per_round = None if summary is plain else summary.tokens_per_round
    further = {"tokens_per_round": tokens_per_round, "ar_tokens_per_second": plain.tokens_per_second}
    return _from_summary(Measured, summary, **further)


def _from_summary(document: type[D], summary: Summary, **further: Any) -> D:
    """A document with the fields of a summary that have the same names, and ``further`` ones."""
    shared = {name: value for name, value in vars(summary).items() if name in document.model_fields}
    return document(**{**shared, **further})
