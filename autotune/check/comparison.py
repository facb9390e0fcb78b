"""Base and head: the two sides of a comparison, their counts and their times. Loads no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from autotune.check.counts import counts_gate
from autotune.check.decoded_workload import DecodedWorkload
from autotune.check.launched_arm import LaunchedArm
from autotune.check.result import BASE_COUNTS, TIME, Gate, GateVerdict, Timing
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.errors import NotComparable, UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.not_slower import (
    PAIRS_PER_LAUNCH,
    Design,
    InterimAnalysis,
    NotSlower,
    Verdict,
    estimate,
    launches_of,
    log_ratios,
)
from autotune.evaluation.race import Race, TimeLimit, race
from autotune.evaluation.runner import ArmRunner
from autotune.files import WORKSPACE, content_key

CHECKS = WORKSPACE / "checks"


@dataclass(frozen=True)
class Contender:
    """A side of a comparison."""

    label: str
    """For people: a commit, or a profile's path."""
    key: str
    """Hash of all that its speed follows from, apart from the machine."""
    profile: DecodingProfile
    launch: Callable[[DecodedWorkload], AbstractContextManager[Arm]]
    """Starts a process that decodes the prompts of a workload."""

    @property
    def trees(self) -> object:
        """The choices from which counts follow."""
        return self.profile.point.model_dump(exclude={"predicted", "measured", "fallback"})


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
                f"--against {label}: its {aspect} is {of_base}{weights}, that of the checked profile is {of_head}; "
                f"compare profiles with the same {aspect}"
            )


@dataclass(frozen=True)
class Comparison:
    base: Contender
    head: Contender
    design: Design
    seed: int
    console: Console

    def counts_gate(self, decoded: DecodedWorkload) -> Gate:
        """The gate on the head's counts compared with the base's, measured now on the same device.

        The base decodes every prompt once, and again if that shows a regression, which counts only if the base repeats.
        """
        if self.base.trees != self.head.trees:
            return decoded.skipped_gate(
                BASE_COUNTS, "the profiles choose other drafts, trees or commands: time decides"
            )
        if self.head.profile.backend != RUNTIME:
            return decoded.skipped_gate(BASE_COUNTS, "an engine's counts are compared with the profile's evidence")
        if decoded.not_repeated:
            return decoded.not_repeated_gate(BASE_COUNTS)
        base = self._base_runs(decoded)
        gate = counts_gate(
            decoded.runs,
            base,
            decoded.prices,
            name=BASE_COUNTS,
            workload=decoded.workload.name,
            source=self.base.label,
            tolerance=self.design.tolerance,
            different_answer_reason=decoded.rounding or None,
        )
        again = self._base_runs(decoded) if gate.verdict == "failed" else base
        if [run.counts for run in again] != [run.counts for run in base]:
            return decoded.skipped_gate(BASE_COUNTS, f"the counts of {self.base.label} are not reproducible")
        return gate

    def _base_runs(self, decoded: DecodedWorkload) -> list[Decoded]:
        with self.base.launch(decoded) as arm:
            return [arm.decode(prompt) for prompt in decoded.workload.prompts]

    def time_gate(self, decoded: DecodedWorkload, *, budget_s: float) -> tuple[Gate, Timing | None]:
        """The gate on the head's time compared with the base's.

        Raises:
            UserError: a side cannot go on.
        """
        base, head, workload = self.base, self.head, decoded.workload
        if base.key == head.key:
            same = f"{base.label} has the same code, models, required packages and choices: nothing to time"
            return Gate(name=TIME, workload=workload.name, verdict="passed", summary=same), None
        key = content_key([base.key, base.label, head.key, workload.sha256, self.seed, decoded.hardware.key])
        ledger = CHECKS / f"{key}.jsonl"
        are_lossless = base.profile.point.lossless and head.profile.point.lossless
        rule = NotSlower(self.design, budget_s, self.seed, must_agree=not decoded.rounding and are_lossless)
        measured = self._race(decoded, rule, ArmRunner(ledger), budget_s)
        if rule.analysis is None:
            num_pairs, needed_s = self.design.analyses[0], budget_s - rule.left_s + rule.needed_s
            summary = (
                f"--budget {budget_s:.0f}s: the first analysis, at {num_pairs} pairs, takes about {needed_s:.0f} s here; give "
                f"--budget {math.ceil(1.2 * needed_s / 60)}m (the {len(measured.runs['base'])} pairs so far are kept)"
            )
            return Gate(name=TIME, workload=workload.name, verdict="inconclusive", summary=summary), None
        analysis = rule.analysis
        is_out_of_time = analysis.verdict is Verdict.CONTINUE and analysis.num_pairs < self.design.max_pairs
        if not is_out_of_time:  # the next check must measure again
            ledger.rename(ledger.with_name(f"{ledger.stem}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"))
        base_runs, head_runs = (measured.runs[name][: analysis.num_pairs] for name in ("base", "head"))
        slowdown, ci95 = estimate(log_ratios(base_runs, head_runs), launches_of(analysis.num_pairs))
        timing = Timing(
            base=base.label,
            head=head.label,
            slowdown=slowdown,
            ci95=ci95,
            p_within_tolerance=float(analysis.p_within_tolerance),
            p_beyond_limit=float(analysis.p_beyond_limit),
            base_ms=[run.decode_ms for run in base_runs],
            head_ms=[run.decode_ms for run in head_runs],
        )
        verdict, reason = self._verdict(analysis, is_out_of_time=is_out_of_time)
        low, high = ci95
        change = f"head {100 * slowdown:+.1f} % time ({100 * low:+.1f} to {100 * high:+.1f} %)"
        summary = f"{change} after {analysis.num_pairs} pairs: {reason}"
        return Gate(name=TIME, workload=workload.name, verdict=verdict, summary=summary), timing

    def _verdict(self, analysis: InterimAnalysis, *, is_out_of_time: bool) -> tuple[GateVerdict, str]:
        """The verdict of the last analysis, and its reason."""
        if analysis.verdict is Verdict.FAIL:
            p = float(analysis.p_within_tolerance)
            return "failed", f"slower by more than {100 * self.design.tolerance:g} % (p = {p:.2g})"
        if analysis.verdict is Verdict.PASS:
            return "passed", f"not slower by {100 * self.design.limit:g} % (p = {float(analysis.p_beyond_limit):.2g})"
        if is_out_of_time:
            return (
                "inconclusive",
                "the budget ended before the next analysis; raise --budget, and the pairs so far count",
            )
        return "inconclusive", (
            "undecided at the last analysis; the machine is too noisy for this limit, or the slowdown is between "
            "tolerance and limit"
        )

    def _race(self, decoded: DecodedWorkload, rule: NotSlower, runner: ArmRunner, budget_s: float) -> Race:
        prompts = [
            prompt
            for prompt, run in zip(decoded.workload.prompts, decoded.runs, strict=True)
            if run.new_tokens > 1  # else there is no time after the first token
        ]
        sides = {"base": self.base, "head": self.head}
        arms = [LaunchedArm(name, side.key, lambda side=side: side.launch(decoded)) for name, side in sides.items()]  # type: ignore[misc]
        deadline = time.monotonic() + budget_s
        stage = self.console.stage(f"pairs of {decoded.workload.name}", self.design.max_pairs)
        with stage as update, arms[0], arms[1]:
            arms[0].rivals = arms[1].rivals = arms.copy()
            measured = race(
                runner,
                arms,
                prompts,
                rule,
                time_limit=TimeLimit(deadline, PAIRS_PER_LAUNCH),  # the first launch tells how long the others take
                seed=self.seed,
                report=lambda done, total: update(done, total, ""),
            )
        for name, reason in measured.failed.items():
            raise UserError(f"the {name}, {sides[name].label}, cannot go on: {reason}")
        return measured
