"""Confirms operating points by real runs on tuning prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.console import Console
from autotune.documents.condition import Condition
from autotune.documents.configuration import Configuration
from autotune.documents.run import Run
from autotune.evaluation.race import race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import speedup
from autotune.prediction.evaluator import Candidate, Evaluator
from autotune.search.finalists import print_labels
from autotune.search.thresholds import MIN_GAIN, MIN_PROMPTS, RISK
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload

POINT = "point"


@dataclass(frozen=True)
class PointConfirmation:
    """Runs operating points next to the winner and the best published default."""

    runner: ArmRunner
    evaluator: Evaluator
    tune: Workload
    """The prompts that the evaluator has replayed."""
    winner: Configuration
    default: Configuration | None
    console: Console
    seed: int
    deadline: float
    """A value of ``time.monotonic``: points that would begin later are not kept."""

    def confirmed(self, points: Sequence[tuple[Condition, Candidate]]) -> list[tuple[Condition, Configuration]]:
        """The points that beat both on the prompts that meet their conditions."""
        rivals = {"winner": self.winner} | ({} if self.default is None else {"default": self.default})
        kept: list[tuple[Condition, Configuration]] = []
        rows: list[list[str]] = []
        labels: dict[str, str] = {}
        for number, (condition, predicted) in enumerate(points):
            candidate = self.evaluator.with_fallback(predicted).configuration
            if candidate.key in {rival.key for rival in rivals.values()}:
                continue
            if time.monotonic() > self.deadline:
                self.console.say(
                    f"{len(points) - number} operating points were not confirmed in their share of the budget"
                )
                break
            runs = self._runs(condition, {**rivals, POINT: candidate})
            # An arm that left before the others has fewer runs.
            ratios = {name: speedup(runs[name], runs[POINT][: len(runs[name])]) for name in rivals}
            is_faster = max(ratios.values()) <= 1 - MIN_GAIN
            name = f"{len(rows) + 1}"
            labels[name] = f"{condition.label}: {candidate.label}"
            cells = [f"{ratios[rival]:.2f}" if rival in ratios else "-" for rival in ("winner", "default")]
            rows.append([name, *cells, f"{len(runs[POINT])}", "yes" if is_faster else "no"])
            if is_faster:
                kept.append((condition, candidate))
        if rows:
            columns = ["point", "time / winner's time", "time / best default's", "prompts", "kept"]
            self.console.table("Operating points on tuning prompts", columns, rows)
            print_labels(labels, self.console)
        return kept

    def _runs(self, condition: Condition, configurations: Mapping[str, Configuration]) -> Mapping[str, Sequence[Run]]:
        """Runs of the arms on the tuning prompts that meet a condition, until the difference of the point to the others is
        significant or the time is over.
        """
        prompts = _prompts_of(condition, self.evaluator, self.tune)
        arms = [self.runner.arm(name, configuration) for name, configuration in configurations.items()]
        return race(
            self.runner,
            arms,
            Workload(self.tune.name, self.tune.split, prompts),
            risk=RISK,
            prompts_per_block=MIN_PROMPTS,
            min_prompts=MIN_PROMPTS,
            ends=lambda leaders: POINT not in leaders or len(leaders) == 1,
            seed=self.seed,
            deadline=self.deadline,
        ).runs


def _prompts_of(condition: Condition, evaluator: Evaluator, tune: Workload) -> tuple[WorkloadPrompt, ...]:
    """The recorded prompts that meet a condition."""
    trace = next(iter(evaluator.traces.values()))
    return tuple(
        prompt
        for p, prompt in enumerate(tune.prompts)
        if condition.matches(
            temperature=prompt.settings.temperature or 0.0,
            prompt_tokens=int(trace.prompt_length[p]),
            has_image=bool(trace.num_visual_tokens[p] > 0),
            workload=prompt.settings.task,
        )
    )
