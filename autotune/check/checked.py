"""A workload decoded with a profile and plainly, and the gates that need nothing else. Loads no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from autotune.check.gates import counts_gate, if_repeatable, lossless_gate, skipped, speedup_gate
from autotune.check.result import COUNTS, Gate, WorkloadResult
from autotune.check.settings import CheckSettings
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import stamp
from autotune.errors import NotComparable, UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import summarize
from autotune.workloads.workload import Workload


@dataclass(frozen=True)
class CheckedWorkload:
    """One workload, decoded with a profile and plainly."""

    workload: Workload
    runs: list[Decoded]
    """The profile's."""
    result: WorkloadResult
    gates: list[Gate]
    """The gates that need no base."""


@dataclass(frozen=True)
class Side:
    """One of two versions that are compared: the base or the head."""

    label: str
    """For people: a commit, or a profile's path."""
    key: str
    """Hash of all that its speed follows from, apart from the machine."""
    profile: DecodingProfile
    launch: Callable[[], AbstractContextManager[Arm]]
    """Starts a process that decodes the prompts of the checked workloads."""
    known: Mapping[str, float] = field(default_factory=dict)
    """ln(t_head / t_base) in the profile, by the prompt's hash, for a head that is compared with this ratio; empty for
    sides that are compared with each other.
    """


class CheckedBackend(ABC):
    """A profile with the backend that decodes it. ``load`` or ``check`` sets the attributes."""

    arms: list[Arm]
    """Plain decoding, and the profile unless it decodes plainly."""
    precision: str
    hardware: Fingerprint
    rounding: str
    """Why equal work may give other answers; empty if it may not."""

    def __init__(self, settings: CheckSettings, profile: DecodingProfile, console: Console) -> None:
        self.settings, self.profile, self.console = settings, profile, console

    @abstractmethod
    def sides(self, folder: Path) -> AbstractContextManager[tuple[Side, Side]]:
        """Base and head of ``--against``.

        Raises:
            NotComparable: the profiles are of other models, precisions, devices or backends.
        """

    def measured_sides(self, checked: CheckedWorkload) -> tuple[Side, Side] | str | None:
        """Plain decoding and the profile, with the ratio of their times that the profile has measured; or why these
        times are not compared. None: there is nothing to compare without ``--against``.
        """
        return None

    def load(self) -> None:  # noqa: B027 - a server is started for each workload
        """Load the models."""

    def close(self) -> None:  # noqa: B027
        """Free the memory of the models, which workers need."""

    @abstractmethod
    def prepared(self, workload: Workload) -> Workload:
        """The prompts that the backend can decode, whose inputs are written for worker processes."""

    @abstractmethod
    def differences(
        self, workload: Workload, runs: Sequence[Decoded], plain: Sequence[Decoded]
    ) -> tuple[dict[str, str], bool]:
        """Where answers that must be lossless differ from plain decoding's, by prompt, and whether that is rounding."""

    def check(self, workload: Workload) -> CheckedWorkload:
        """Decode a workload side by side with plain decoding, and judge what needs no base.

        Raises:
            UserError: an arm cannot go on.
            NotComparable: see ``evidence_for``.
        """
        settings, name = self.settings, workload.name
        workload = self.prepared(workload)
        decoded = self._decode(self.arms, workload)
        plain, runs = decoded[0], decoded[-1]
        summary = summarize(TUNED, runs, plain, seed=settings.seed)
        differences, is_rounding = self.differences(workload, runs, plain)
        lossless = lossless_gate(name, summary, differences, self.rounding if is_rounding else "")
        gates = [lossless, self._counts_gate(workload, runs)]
        if settings.min_speedup is not None:
            gates.append(speedup_gate(name, summary, settings.min_speedup))
        result = WorkloadResult(
            name=name,
            sha256=workload.sha256,
            num_prompts=summary.num_prompts,
            identical_outputs=summary.identical_outputs,
            divergences=[f"{prompt}: {where}" for prompt, where in differences.items()],
            speedup=summary.speedup,
            ci95=summary.ci95,
            precision=self.precision,
            prompts=[run.without_tokens() for run in runs],
            plain_ms=[run.decode_ms for run in plain],
        )
        return CheckedWorkload(workload, runs, result, gates)

    def _decode(self, arms: Sequence[Arm], workload: Workload) -> list[list[Decoded]]:
        """The runs of every arm, decoded prompt by prompt in random order."""
        with self.console.stage(f"check of {workload.name}", len(workload.prompts)) as update:
            done = race(ArmRunner(), arms, workload.prompts, Everyone(), seed=self.settings.seed, report=update)
        for reason in done.failed.values():
            raise UserError(reason)
        return [done.runs[arm.name] for arm in arms]

    def _counts_gate(self, workload: Workload, runs: Sequence[Decoded]) -> Gate:
        """The gate on the counts compared with the profile's evidence about the first prompts."""
        known = evidence_for(self.profile, workload, runs, self.settings)
        if isinstance(known, str):
            return skipped(COUNTS, workload.name, known)
        tuned, device = self.arms[-1], self.profile.hardware.key
        changes = self.profile.provenance.changes(stamp())
        gate = counts_gate(
            runs[: len(known)],
            known,
            self.profile.point.fallback,
            name=COUNTS,
            workload=workload.name,
            source="the profile's evidence",
            tolerance=self.settings.tolerance if self.profile.backend == RUNTIME else None,
            advisory_reason="" if self.hardware.key == device else f"the profile's evidence was made on {device}",
            rounding=self.rounding or (f"with {changes}" if changes else ""),
        )
        if tuned.keeps_state:  # an answer to the same prompt has other drafts the second time
            return gate
        return if_repeatable(gate, runs, lambda: self._decode([tuned], workload)[0])


def evidence_for(
    profile: DecodingProfile, workload: Workload, runs: Sequence[Decoded], settings: CheckSettings
) -> list[Decoded] | str:
    """The profile's evidence about the workload's first prompts, or why there is none.

    Raises:
        NotComparable: there is none, and no other gate was asked for.
    """
    source, evidence = settings.profile, profile.evidence.prompts[: len(runs)]
    if not evidence:
        return (
            f"{source} was not measured: no evidence to compare counts with; search on this device, or give --against"
        )
    changed = [
        run.prompt
        for run, known in zip(runs, evidence, strict=False)
        if run.prompt_sha256 != known.prompt_sha256 or known.answer_key not in ("", run.answer_key)
    ]
    if not changed:
        return evidence
    reason = (
        f"no evidence about these prompts of {workload.name}: {len(changed)} of the first {len(evidence)} are not those of the "
        f"search on {profile.workload.name}, or the target's chat template, tokenizer, processor or generation config has "
        f"changed (first: {changed[0]})"
    )
    if settings.against is None and settings.min_speedup is None:
        raise NotComparable(f"{source} has {reason}; check the workload and the files of the search, or search again")
    return reason
