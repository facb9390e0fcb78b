"""The evidence that a profile gets from runs on held-out prompts, of the runtime and of engines. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import ALL, AR, HF, TUNED, ComparedArm, Differences, Evidence, Gain, Measured
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
        compared = [
            _from_summary(ComparedArm, self.summaries[name], predicted_speedup=self.predicted.get(name))
            for name in self.configurations
        ]
        return {
            "prompts": [run.without_tokens() for run in self.runs[decoded]],
            "plain_token_ms": [run.token_ms for run in self.runs[AR][: len(self.runs[decoded])]],
            "compared": compared,
            "best_default": self.best_default,
            "gains": self.gains,
        }

    def measured(self, decoded: str) -> Measured:
        """The measurement of an arm on all prompts that it decoded."""
        summary = self.summaries[decoded]
        return _from_summary(Measured, summary, tokens_per_round=None if decoded == AR else summary.tokens_per_round)


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Print the tables of an evaluation, what its arms decode with, and the outputs that differ from plain decoding."""
    arms, *others = Evidence(**evaluation.evidence(evaluation.tuned)).tables(evaluation.tuned)
    labels = {name: c.label for name, c in evaluation.configurations.items() if c is not None and c.label != name}
    for table in (replace(arms, labels={**arms.labels, **labels}), *others):
        if table.rows:
            console.show(table)
    differences = evaluation.differences
    if num := differences.rounding + len(differences.other) + differences.unexamined:
        parts = (
            f"{differences.rounding} by rounding alone, after near ties; {len(differences.other)} for another reason"
        )
        late = f"; {differences.unexamined} not examined within the budget" if differences.unexamined else ""
        console.say(f"{num} outputs of {evaluation.tuned} differ from plain decoding: {parts}{late}")
    for difference in differences.other:
        console.say(f"  {difference}")


def _from_summary(document: type[D], summary: Summary, **further: Any) -> D:
    """A document with the fields of a summary that have the same names, and ``further`` ones."""
    shared = {name: value for name, value in vars(summary).items() if name in document.model_fields}
    return document(**{**shared, **further})
