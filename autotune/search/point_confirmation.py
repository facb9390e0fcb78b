"""Confirms operating points by real runs on tuning prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.console import Console
from autotune.documents.condition import Condition
from autotune.documents.configuration import Configuration
from autotune.evaluation.runner import ArmRunner
from autotune.search.elimination import RISK, is_significantly_slower
from autotune.search.evaluator import Candidate, Evaluator
from autotune.search.finalists import print_labels
from autotune.search.operating_points import MIN_GAIN
from autotune.trees.limits import Floats
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload

POINT_PROMPTS = 4  # of an operating point between two interim analyses
POINT = "point"


@dataclass(frozen=True)
class PointConfirmation:
    """Runs operating points beside the winner and the best published default."""

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
            ms = self._decode_ms(condition, {**rivals, POINT: candidate})
            ratios = {name: float(ms[POINT].sum() / ms[name].sum()) for name in rivals}
            is_faster = max(ratios.values()) <= 1 - MIN_GAIN
            name = f"{len(rows) + 1}"
            labels[name] = f"{condition.label}: {candidate.label}"
            cells = [f"{ratios[rival]:.2f}" if rival in ratios else "-" for rival in ("winner", "default")]
            rows.append([name, *cells, f"{len(ms[POINT])}", "yes" if is_faster else "no"])
            if is_faster:
                kept.append((condition, candidate))
        if rows:
            columns = ["point", "time / winner's time", "time / best default's", "prompts", "kept"]
            self.console.table("Operating points on tuning prompts", columns, rows)
            print_labels(labels, self.console)
        return kept

    def _decode_ms(self, condition: Condition, configurations: Mapping[str, Configuration]) -> dict[str, Floats]:
        """Decoding times of the arms on the tuning prompts that meet a condition, until the difference of the point to
        the others is significant or the time is over.
        """
        prompts = _prompts_of(condition, self.evaluator, self.tune)
        arms = [self.runner.arm(name, configuration) for name, configuration in configurations.items()]
        ms = {arm.name: np.zeros(0) for arm in arms}
        for begin in range(0, len(prompts), POINT_PROMPTS):
            part = Workload(self.tune.name, self.tune.split, prompts[begin : begin + POINT_PROMPTS])
            runs = self.runner.compare(
                arms, part, seed=self.seed + begin, min_prompts=POINT_PROMPTS, keep_memory=begin > 0
            )
            ms = {name: np.append(ms[name], [run.decode_ms for run in runs[name]]) for name in ms}
            others = [ms[name] for name in ms if name != POINT]
            is_faster = all(is_significantly_slower(other, ms[POINT], risk=RISK) for other in others)
            is_slower = any(is_significantly_slower(ms[POINT], other, risk=RISK) for other in others)
            if is_faster or is_slower or time.monotonic() > self.deadline:
                break
        return ms


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
