"""A workload decoded with a profile and plainly: the counts, the answers, and the speedup. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autotune.check.counts import counts_gate
from autotune.check.result import COUNTS, LOSSLESS, SPEEDUP, Gate, GateVerdict, Timing, WorkloadResult
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import Summary, summarize
from autotune.trees.fallback import RoundPrice
from autotune.workloads.workload import Workload


@dataclass(frozen=True)
class DecodedWorkload:
    """One workload, decoded with a profile and plainly."""

    workload: Workload
    profile: DecodingProfile
    runs: list[Decoded]
    plain: list[Decoded]
    """Runs of plain decoding."""
    seed: int
    """Seed of the interval of the speedup."""
    divergences: Mapping[str, str]
    """By prompt: where an answer that must be lossless first differs from plain decoding."""
    evidence: list[Decoded] | str
    """The profile's, about the first prompts, or why there is none."""
    precision: str
    hardware: Fingerprint
    rounding: str = ""
    """Why equal work may give other answers; empty if it may not."""
    is_rounding: bool = True
    """Whether this explains all divergences."""
    not_repeated: list[str] = field(default_factory=list)
    """Prompts whose counts differed the second time."""
    gates: Sequence[Gate] = ()
    """Further gates, which the backend alone has."""
    requests: Mapping[str, Path] = field(default_factory=dict)
    """Files of the inputs of workers by prompt, where there are workers."""

    @cached_property
    def summary(self) -> Summary:
        return summarize(TUNED, self.runs, self.plain, seed=self.seed)

    @property
    def prices(self) -> list[RoundPrice | None]:
        return [self.profile.point.fallback for _ in self.runs]

    def result(self, timing: Timing | None) -> WorkloadResult:
        return WorkloadResult(
            name=self.workload.name,
            sha256=self.workload.sha256,
            num_prompts=self.summary.num_prompts,
            identical_outputs=self.summary.identical_outputs,
            divergences=[f"{name}: {divergence}" for name, divergence in self.divergences.items()],
            speedup=self.summary.speedup,
            ci95=self.summary.ci95,
            precision=self.precision,
            prompts=[run.without_tokens() for run in self.runs],
            plain_ms=[run.decode_ms for run in self.plain],
            timing=timing,
        )

    # -------- gates

    def skipped_gate(self, name: str, reason: str) -> Gate:
        return Gate(name=name, workload=self.workload.name, verdict="skipped", summary=reason)

    def lossless_gate(self) -> Gate:
        """Fails if an answer of a lossless profile differs from plain decoding, and not by rounding."""
        summary = self.summary
        verdict: GateVerdict = "passed"
        if self.divergences:
            verdict = "warned" if self.rounding and self.is_rounding else "failed"
        text = {
            "passed": f"{summary.identical_outputs}/{summary.num_prompts} outputs equal plain decoding",
            "warned": f"{len(self.divergences)} outputs differ from plain decoding: {self.rounding}",
            "failed": "the output differs from plain decoding",
        }[verdict]
        if not self.profile.point.lossless:
            text += ", LOSSY profile"
        details = [f"{name}: output differs at {divergence}" for name, divergence in self.divergences.items()]
        return Gate(name=LOSSLESS, workload=self.workload.name, verdict=verdict, summary=text, details=details)

    def speedup_gate(self, min_speedup: float) -> Gate:
        """Fails only if the whole confidence interval is below the minimum, so that noise alone does not fail."""
        low, high = self.summary.ci95
        has_failed = high < min_speedup
        return Gate(
            name=SPEEDUP,
            workload=self.workload.name,
            verdict="failed" if has_failed else "passed",
            summary=f"the speedup {'is below' if has_failed else 'may be'} {min_speedup:g}: {self.summary.speedup:.2f}x "
            f"({low:.2f}-{high:.2f})",
        )

    def counts_gate(self, tolerance: float) -> Gate:
        """The gate on the counts compared with the profile's evidence about the first prompts."""
        if isinstance(self.evidence, str):
            return self.skipped_gate(COUNTS, self.evidence)
        if self.not_repeated:
            return self.not_repeated_gate(COUNTS)
        source, num, device = "the profile's evidence", len(self.evidence), self.profile.hardware.key
        changes = self.profile.provenance.changes(stamp())
        return counts_gate(
            self.runs[:num],
            self.evidence,
            self.prices[:num],
            name=COUNTS,
            workload=self.workload.name,
            source=source,
            tolerance=tolerance if self.profile.backend == RUNTIME else None,  # an engine's rounds have no prices
            advisory_reason=None if self.hardware.key == device else f"{source} was made on {device}",
            different_answer_reason=self.rounding or (f"with {changes}" if changes else None),
        )

    def not_repeated_gate(self, name: str) -> Gate:
        shown = ", ".join(self.not_repeated[:3])
        which = f"{len(self.not_repeated)} of {len(self.runs)} prompts have other counts when decoded again ({shown})"
        return self.skipped_gate(name, f"counts are not reproducible: {which}")


def decode_all(
    arms: Sequence[Arm], workload: Workload, seed: int, console: Console, runner: ArmRunner | None = None
) -> list[list[Decoded]]:
    """The runs of every arm on a workload's prompts, decoded prompt by prompt in random order.

    Raises:
        UserError: an arm cannot go on.
    """
    with console.stage(f"check of {workload.name}", len(workload.prompts)) as update:
        measured = race(
            runner or ArmRunner(),
            arms,
            workload.prompts,
            Everyone(),
            seed=seed,
            report=lambda done, total: update(done, total, ""),
        )
    for reason in measured.failed.values():
        raise UserError(reason)
    return [measured.runs[arm.name] for arm in arms]
