"""Base and head: their counts and their times. Loads no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from autotune.check.checked import CheckedBackend, CheckedWorkload, Side
from autotune.check.gates import counts_gate, if_repeatable, skipped
from autotune.check.result import BASE_COUNTS, PROFILE_TIME, TIME, Gate, GateVerdict, Timing
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.errors import NotComparable, UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.not_slower import (
    PAIRS_PER_LAUNCH,
    Design,
    NotSlower,
    Verdict,
    estimate,
    launches_of,
    log_ratios,
)
from autotune.evaluation.race import Race, TimeLimit, race
from autotune.evaluation.runner import ArmRunner
from autotune.files import WORKSPACE, content_key
from autotune.workloads.prompt import WorkloadPrompt

CHECKS = WORKSPACE / "checks"
VERDICTS: dict[Verdict, tuple[GateVerdict, str]] = {
    Verdict.FAIL: ("failed", "slower by more than {tolerance:g} % (p = {p_within:.2g})"),
    Verdict.PASS: ("passed", "not slower by {limit:g} % (p = {p_beyond:.2g})"),
    Verdict.CONTINUE: (
        "inconclusive",
        "undecided at the last analysis; the machine is too noisy for this limit, or the slowdown is between tolerance and "
        "limit",
    ),
}


def require_comparable(base: DecodingProfile, head: DecodingProfile, label: str) -> None:
    """
    Args:
        label: of the base.

    Raises:
        NotComparable: the profiles are of other models, precisions, devices or backends.
    """
    for aspect, of_base, of_head, is_same in (
        ("backend", base.backend, head.backend, base.backend == head.backend),
        ("target", base.target.id, head.target.id, base.target.sha256 == head.target.sha256),
        ("precision", base.precision, head.precision, base.precision == head.precision),
        ("device", base.hardware.key, head.hardware.key, base.hardware.key == head.hardware.key),
    ):
        if not is_same:
            weights = " with other weights" if of_base == of_head else ""
            raise NotComparable(
                f"--against {label}: its {aspect} is {of_base}{weights}, that of the checked profile is {of_head}; compare "
                f"profiles with the same {aspect}"
            )


class LaunchedArm(Arm, AbstractContextManager["LaunchedArm"]):
    """An arm in a new process for each block of a race, because a process may be slow for as long as it lives."""

    _arm: Arm  # since the first ``prepare``

    def __init__(self, name: str, side: Side) -> None:
        self.name, self.key, self.launch = name, f"{name}-{side.key}", side.launch
        self.rivals = [self]
        """Arms that are started together, and take turns in being the first."""
        self._process = ExitStack()
        self._is_new = False  # has decoded nothing but warm-ups

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        if not self._is_new:  # else a rival has started this one
            for rival in self.rivals:
                rival._process.close()
                rival._arm = rival._process.enter_context(rival.launch())
                rival._is_new = True
            self.rivals.reverse()
        self._arm.prepare(prompts[:PAIRS_PER_LAUNCH])

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        self._is_new = False
        return self._arm.decode(prompt).model_copy(update={"arm": self.key})


@dataclass(frozen=True)
class Comparison:
    """Compares two sides on the workloads that a backend has checked."""

    base: Side
    head: Side
    design: Design
    backend: CheckedBackend

    def counts_gate(self, checked: CheckedWorkload) -> Gate:
        """The gate on the head's counts compared with the base's."""
        name = checked.workload.name
        if self.head.profile.backend != RUNTIME:
            return skipped(BASE_COUNTS, name, "an engine's counts are compared with the profile's evidence")
        choices = [
            side.profile.point.model_dump(exclude={"predicted", "measured", "fallback"})
            for side in (self.base, self.head)
        ]
        if choices[0] != choices[1]:
            return skipped(BASE_COUNTS, name, "the sides decode with other trees")
        base_runs = self._base_runs(checked)
        gate = counts_gate(
            checked.runs,
            base_runs,
            self.head.profile.point.fallback,
            name=BASE_COUNTS,
            workload=name,
            source=self.base.label,
            tolerance=self.design.tolerance,
            rounding=self.backend.rounding,
        )
        return if_repeatable(gate, base_runs, lambda: self._base_runs(checked))

    def _base_runs(self, checked: CheckedWorkload) -> list[Decoded]:
        with self.base.launch() as arm:
            return [arm.decode(prompt) for prompt in checked.workload.prompts]

    def time_gate(self, checked: CheckedWorkload, *, budget_s: float) -> tuple[Gate, Timing | None]:
        """The gate on the head's time compared with the base's.

        Raises:
            UserError: a side cannot go on.
        """
        base, head, workload, design = self.base, self.head, checked.workload, self.design
        name = PROFILE_TIME if head.known else TIME
        if base.key == head.key:
            return Gate(
                name=name,
                workload=workload.name,
                verdict="passed",
                summary=f"{base.label} has the same code, models, required packages and choices: nothing to time",
            ), None
        key = content_key(
            [
                base.key,
                base.label,
                head.key,
                workload.sha256,
                [*head.known.items()],
                self.backend.settings.seed,
                self.backend.hardware.key,
            ]
        )
        ledger = CHECKS / f"{key}.jsonl"
        must_agree = (
            not self.backend.rounding
            and base.profile.point.verification.is_lossless
            and head.profile.point.verification.is_lossless
        )
        rule = NotSlower(design, budget_s, self.backend.settings.seed, must_agree=must_agree, known=head.known)
        measured = self._race(checked, rule, ArmRunner(ledger), budget_s)
        analysis = rule.analysis
        if analysis is None:
            needed_s = budget_s - rule.left_s + rule.needed_s
            summary = (
                f"--budget {budget_s:.0f}s: the first analysis, at {design.analyses[0]} pairs, takes about {needed_s:.0f} s "
                f"here; give --budget {math.ceil(1.2 * needed_s / 60)}m (the {len(measured.runs['base'])} pairs so far are "
                "kept)"
            )
            return Gate(name=name, workload=workload.name, verdict="inconclusive", summary=summary), None
        base_runs, head_runs = (measured.runs[side][: analysis.num_pairs] for side in ("base", "head"))
        slowdown, ci95 = estimate(log_ratios(base_runs, head_runs, head.known), launches_of(analysis.num_pairs))
        timing = Timing(
            base=base.label,
            head=head.label,
            slowdown=slowdown,
            ci95=ci95,
            p_within_tolerance=float(analysis.p_within_tolerance),
            p_beyond_limit=float(analysis.p_beyond_limit),
            base_ms=[run.decode_ms for run in base_runs],
            head_ms=[run.decode_ms for run in head_runs],
            margin=rule.margin,
        )
        verdict, reason = VERDICTS[analysis.verdict]
        if analysis.verdict is Verdict.CONTINUE and analysis.num_pairs < design.max_pairs:
            reason = "the budget ended before the next analysis; raise --budget, and the pairs so far count"
        else:
            ledger.unlink()  # the next check measures again
        reason = reason.format(
            tolerance=round(100 * (design.tolerance + rule.margin), 1),
            limit=round(100 * (design.limit + rule.margin), 1),
            p_within=timing.p_within_tolerance,
            p_beyond=timing.p_beyond_limit,
        )
        subject, what = ("time over plain decoding's", "since the profile") if head.known else ("head", "time")
        summary = (
            f"{subject} {100 * slowdown:+.1f} % {what} ({100 * ci95[0]:+.1f} to {100 * ci95[1]:+.1f} %) after "
            f"{analysis.num_pairs} pairs: {reason}"
        )
        return Gate(name=name, workload=workload.name, verdict=verdict, summary=summary), timing

    def _race(self, checked: CheckedWorkload, rule: NotSlower, runner: ArmRunner, budget_s: float) -> Race:
        prompts = [
            prompt
            for prompt, run in zip(checked.workload.prompts, checked.runs, strict=True)
            if run.new_tokens > 1  # else there is no time after the first token
            and (not self.head.known or prompt.sha256 in self.head.known)
        ]
        sides = {"base": self.base, "head": self.head}
        arms = [LaunchedArm(name, side) for name, side in sides.items()]
        limit = TimeLimit(time.monotonic() + budget_s, PAIRS_PER_LAUNCH)  # the first launch tells how long others take
        stage = self.backend.console.stage(f"pairs of {checked.workload.name}", self.design.max_pairs)
        with stage as update, arms[0], arms[1]:
            arms[0].rivals = arms[1].rivals = arms.copy()
            measured = race(
                runner, arms, prompts, rule, time_limit=limit, seed=self.backend.settings.seed, report=update
            )
        for name, reason in measured.failed.items():
            raise UserError(f"the {name}, {sides[name].label}, cannot go on: {reason}")
        return measured
