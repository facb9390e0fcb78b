"""A profile decoded in this process: its counts, its answers, and its speedup over plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.check.counts import Counts, compare_counts, counts_gate
from autotune.check.result import COUNTS, LOSSLESS, SPEEDUP, Gate, GateVerdict, Timing, WorkloadResult
from autotune.check.settings import CheckSettings
from autotune.documents.decoded import Decoded, prompt_evidence
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile, PromptEvidence
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import stamp
from autotune.errors import NotComparable
from autotune.evaluation.divergence import divergences_from_plain
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runtime_arms import DecoderArm, RuntimeArms
from autotune.evaluation.summary import Summary, summarize
from autotune.machine.device import fingerprint
from autotune.modeling.near_ties import Divergence
from autotune.runtime.answer_keys import AnswerKeys
from autotune.runtime.decoder import Decoder
from autotune.trees.fallback import RoundPrice
from autotune.workloads.workload import Workload


@dataclass(frozen=True)
class LocalRun:
    """One workload, decoded twice with the profile and once plainly."""

    workload: Workload
    profile: DecodingProfile
    runs: list[Decoded]
    prompts: list[PromptEvidence]
    summary: Summary
    divergences: dict[str, Divergence]
    """By prompt: where an answer that must be lossless first differs from plain decoding."""
    not_repeated: list[str]
    """Prompts whose counts differed the second time."""
    precision: str
    hardware: Fingerprint

    @property
    def counts(self) -> list[Counts]:
        return [Counts.of(prompt.name, prompt) for prompt in self.prompts]

    @property
    def is_exact(self) -> bool:
        """Whether batching cannot change a token."""
        return self.precision == "float32"

    @property
    def prices(self) -> list[RoundPrice | None]:
        return [self.profile.points[run.point].fallback for run in self.runs]

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
            prompts=self.prompts,
            timing=timing,
        )

    # -------- gates

    def skipped_gate(self, name: str, reason: str) -> Gate:
        return Gate(name=name, workload=self.workload.name, verdict="skipped", summary=reason)

    def lossless_gate(self) -> Gate:
        """Fails if an answer of a lossless point differs from plain decoding, other than by a near tie in reduced
        precision.
        """
        summary = self.summary
        verdict: GateVerdict = "passed"
        if self.divergences:
            is_rounding = not self.is_exact and all(divergence.is_near_tie for divergence in self.divergences.values())
            verdict = "warned" if is_rounding else "failed"
        text = {
            "passed": f"{summary.identical_outputs}/{summary.num_prompts} outputs equal plain decoding",
            "warned": f"{len(self.divergences)} outputs differ from plain decoding after near ties in {self.precision}",
            "failed": "the output differs from plain decoding",
        }[verdict]
        if not all(point.lossless for point in self.profile.points):
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

    def counts_gate(self, evidence: list[PromptEvidence], tolerance: float) -> Gate:
        """The gate on the counts compared with the profile's evidence about the first prompts."""
        if self.not_repeated:
            return self.not_repeated_gate(COUNTS)
        source, changes = "the profile's evidence", self.profile.provenance.changes(stamp())
        reason = (f"with {changes}" if changes else None) if self.is_exact else f"near ties in {self.precision}"
        num, device = len(evidence), self.profile.hardware.key
        counts = [Counts.of(prompt.name, prompt) for prompt in evidence]
        return counts_gate(
            compare_counts(self.counts[:num], counts, self.prices[:num]),
            COUNTS,
            self.workload.name,
            source=source,
            tolerance=tolerance,
            advisory_reason=None if self.hardware.key == device else f"{source} was made on {device}",
            different_answer_reason=reason,
        )

    def not_repeated_gate(self, name: str) -> Gate:
        shown = ", ".join(self.not_repeated[:3])
        which = (
            f"{len(self.not_repeated)} of {len(self.prompts)} prompts have other counts when decoded again ({shown})"
        )
        return self.skipped_gate(name, f"counts are not reproducible: {which}")


def decode_locally(decoder: Decoder, workload: Workload, *, seed: int, report: Callable[[int, int], None]) -> LocalRun:
    """Decode prompt by prompt in random order, side by side with plain decoding; then again, to see if counts
    repeat.
    """
    arms = RuntimeArms(decoder)
    runner = arms.runner()
    workload = arms.conversations.follow_workload(workload)
    tuned = arms.plain if decoder.draft is None else DecoderArm(TUNED, decoder, arms)
    steps = 2 * len(workload.prompts)
    prompts, everyone = workload.prompts, Everyone()
    runs = race(
        runner, [arms.plain, tuned], prompts, everyone, seed=seed, report=lambda done, _: report(done, steps)
    ).runs
    again = race(
        runner, [tuned], prompts, everyone, seed=seed, report=lambda done, _: report(steps // 2 + done, steps)
    ).runs
    evidence = [prompt_evidence(run, plain) for run, plain in zip(runs[tuned.name], runs[AR], strict=True)]
    first = [Counts.of(one.name, one) for one in evidence]
    second = [Counts.of(run.prompt, prompt_evidence(run, run)) for run in again[tuned.name]]
    assert decoder.profile is not None
    return LocalRun(
        workload=workload,
        profile=decoder.profile,
        runs=runs[tuned.name],
        prompts=evidence,
        summary=summarize(tuned.name, runs[tuned.name], runs[AR], seed=seed),
        divergences=divergences_from_plain(tuned, prompts, runs[tuned.name], runs[AR]),
        not_repeated=[a.prompt for a, b in zip(first, second, strict=True) if a != b],
        precision=decoder.target.text.precision,
        hardware=fingerprint(str(decoder.target.device)),
    )


def evidence_for(
    profile: DecodingProfile, workload: Workload, settings: CheckSettings, keys: AnswerKeys
) -> list[PromptEvidence] | str:
    """The profile's evidence about the workload's first prompts, or why there is none.

    Raises:
        NotComparable: the evidence is about other prompts of this workload, or other files of the target; or about
            another workload, without another gate.
    """
    source = settings.profile
    evidence = profile.evidence.prompts[: len(workload.prompts)]
    if not evidence:
        return (
            f"{source} was not measured: no evidence to compare counts with; search on this device, or give --against"
        )
    pairs = [*zip(workload.prompts, evidence, strict=False)]
    changed = [prompt.name for prompt, known in pairs if prompt.sha256 != known.sha256]
    if not changed:
        changed = [prompt.name for prompt, known in pairs if known.answer_key not in ("", keys.of(prompt))]
        if not changed:
            return evidence
        difference = (
            f"{source}: the target's files make other tokens, pixels or generation settings of {len(changed)} of "
            f"{len(pairs)} prompts than at the search (first: {changed[0]}): its chat template, tokenizer, processor or "
            "generation config has changed"
        )
        if "strftime_now" in str(getattr(keys.processor, "chat_template", "")):
            return f"{difference}, or the date that its chat template writes"
        raise NotComparable(f"{difference}; restore the files, or search again")
    searched = profile.workload.name
    if workload.name != searched and (settings.against is not None or settings.min_speedup is not None):
        return f"the profile's evidence is about {searched}, not about this workload"
    difference = f"its evidence is about {searched}"
    if workload.name == searched:
        difference = f"{len(changed)} of the first {len(evidence)} prompts have changed"
    raise NotComparable(
        f"{source} has no evidence about these prompts of {workload.name}: {difference} (first: {changed[0]}); check the "
        "workload of the search, or search again"
    )
