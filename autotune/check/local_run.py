"""What a profile does here and now: counts, answers and speedup beside plain decoding, and whether they repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.check.exact import Counts, compare, judge
from autotune.check.result import LOSSLESS, SPEEDUP, Gate, GateVerdict, Timing, WorkloadResult
from autotune.device import fingerprint
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile, PromptEvidence
from autotune.documents.provenance import Provenance, stamp
from autotune.errors import NotComparable
from autotune.evaluation.arms import Arm, DecoderArm
from autotune.evaluation.divergence import Divergence, first_divergence
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runs import Run, prompt_evidence
from autotune.evaluation.summary import Summary, summarize
from autotune.runtime.decoder import Decoder
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.fallback import RoundPrice
from autotune.workloads.workload import Workload


@dataclass(frozen=True)
class LocalRun:
    """One workload, decoded twice by the profile and once plainly."""

    workload: Workload
    profile: DecodingProfile
    runs: list[Run]
    prompts: list[PromptEvidence]
    summary: Summary
    divergences: dict[str, Divergence]
    """Where answers part from plain decoding's though they are promised not to, by prompt."""
    not_repeated: list[str]
    """Prompts that counted otherwise the second time."""
    precision: str
    device: str
    """The key of its fingerprint."""

    @property
    def counts(self) -> list[Counts]:
        return [Counts.of_evidence(prompt) for prompt in self.prompts]

    @property
    def is_exact(self) -> bool:
        """Whether the same computation has the same answer, however it is batched."""
        return self.precision == "float32"

    @property
    def prices(self) -> list[RoundPrice | None]:
        """Of the point that decodes each prompt."""
        return [self.profile.points[run.point].fallback for run in self.runs]

    def result(self, timing: Timing | None) -> WorkloadResult:
        """What a check's document keeps of it."""
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


def decode_here(decoder: Decoder, workload: Workload, *, seed: int, report: Callable[[int, int], None]) -> LocalRun:
    """Side by side with plain decoding, prompt by prompt in random order; and once more, for counts must repeat."""
    runner = ArmRunner(decoder, decoder.processor)
    tuned = runner.plain if decoder.draft is None else DecoderArm(TUNED, decoder)
    of = len(workload.prompts)
    runs = runner.compare([runner.plain, tuned], workload, seed=seed, report=lambda done, _: report(done, 2 * of))
    again = runner.compare([tuned], workload, seed=seed, report=lambda done, _: report(of + done, 2 * of))
    prompts = [prompt_evidence(run, plain) for run, plain in zip(runs[tuned.name], runs[AR], strict=True)]
    second = [Counts.of_evidence(prompt_evidence(run, run)) for run in again[tuned.name]]
    return LocalRun(
        workload=workload,
        profile=decoder.profile,
        runs=runs[tuned.name],
        prompts=prompts,
        summary=summarize(tuned.name, runs[tuned.name], runs[AR], seed=seed),
        divergences=_divergences(runner, tuned, workload, runs),
        not_repeated=[
            then.prompt
            for then, now in zip(map(Counts.of_evidence, prompts), second, strict=True)
            if not now.agrees_with(then)
        ],
        precision=str(decoder.target.dtype).removeprefix("torch."),
        device=fingerprint(str(decoder.target.device)).key,
    )


def _divergences(runner: ArmRunner, arm: Arm, prompts: Workload, runs: dict[str, list[Run]]) -> dict[str, Divergence]:
    """Where an arm's outputs part from plain decoding's though the prompt's point is lossless, by prompt; decoding is
    repeated, as runs keep no tokens.
    """
    found = {}
    points = runner.decoder.profile.points
    for prompt, run, plain_run in zip(prompts.prompts, runs[arm.name], runs[AR], strict=False):
        if run.tokens_sha256 == plain_run.tokens_sha256 or not points[run.point].lossless:
            continue
        target, settings = runner.decoder.target, prompt.settings
        inputs = prompt.inputs(runner.processor, target.device)
        plain, other = (one.decode(inputs, settings)[0] for one in (runner.plain, arm))
        rule = TokenSampler(
            temperature=settings.temperature, top_p=settings.top_p, seed=settings.seed, device=target.device
        )
        divergence = first_divergence(target, inputs, plain, other, rule)
        if divergence is not None:
            found[prompt.name] = divergence
    return found


# ---------------------------------------------------------------------------------------------------------------- gates


def judge_lossless(here: LocalRun) -> Gate:
    """An answer other than plain decoding's fails, unless the prompt's point is lossy, or it begins at a near tie in a
    precision below float32.
    """
    summary = here.summary
    verdict: GateVerdict = "passed"
    if here.divergences:
        is_rounding = not here.is_exact and all(one.is_near_tie for one in here.divergences.values())
        verdict = "warned" if is_rounding else "failed"
    said = {
        "passed": f"{summary.identical_outputs}/{summary.num_prompts} outputs are those of plain decoding",
        "warned": f"{len(here.divergences)} outputs part from plain decoding at near ties of {here.precision}",
        "failed": "the output is not that of plain decoding",
    }[verdict]
    lossy = "" if all(point.lossless for point in here.profile.points) else ", LOSSY profile"
    details = [f"{name}: output differs at {divergence}" for name, divergence in here.divergences.items()]
    return Gate(name=LOSSLESS, workload=here.workload.name, verdict=verdict, summary=said + lossy, details=details)


def judge_speedup(here: LocalRun, min_speedup: float) -> Gate:
    """Fails only if the whole interval lies below the minimum: noise alone fails nothing."""
    low, high = here.summary.ci95
    failed = high < min_speedup
    return Gate(
        name=SPEEDUP,
        workload=here.workload.name,
        verdict="failed" if failed else "passed",
        summary=f"the speedup {'lies below' if failed else 'may be'} {min_speedup:g}: {here.summary.speedup:.2f}x ({low:.2f}-{high:.2f})",
    )


def judge_counts(
    here: LocalRun,
    then: list[PromptEvidence],
    gate: str,
    *,
    source: str,
    made: Provenance,
    device: str,
    tolerance: float,
) -> Gate:
    """Counts beside those that a document holds of the first prompts; ``device`` is where it was made."""
    if here.not_repeated:
        return not_repeated(here, gate)
    now = stamp()
    other_answers = None
    if not here.is_exact:
        other_answers = f"near ties of {here.precision}"
    elif (made.torch, made.transformers) != (now.torch, now.transformers):
        other_answers = f"made with torch {made.torch}, transformers {made.transformers}"
    num = len(then)
    return judge(
        compare(here.counts[:num], [Counts.of_evidence(prompt) for prompt in then], here.prices[:num]),
        gate=gate,
        workload=here.workload.name,
        than=f"in {source}",
        tolerance=tolerance,
        advises_only=None if here.device == device else f"{source} was made on {device}",
        answers_may_differ=other_answers,
    )


def skipped(here: LocalRun, gate: str, why: str) -> Gate:
    """A gate that has nothing to judge by."""
    return Gate(name=gate, workload=here.workload.name, verdict="skipped", summary=why)


def not_repeated(here: LocalRun, gate: str) -> Gate:
    """Nothing can be said of counts that are others every time."""
    shown = ", ".join(here.not_repeated[:3])
    return skipped(
        here,
        gate,
        f"counts cannot gate here: {len(here.not_repeated)} of {len(here.prompts)} prompts count otherwise when decoded again ({shown})",
    )


def evidence_for(
    profile: DecodingProfile, workload: Workload, *, is_needed: bool, source: object
) -> list[PromptEvidence] | str:
    """What the profile's evidence says of the workload's first prompts, or why it says nothing.

    Raises:
        NotComparable: the profile was judged on prompts of this name that were others; or on another workload, and
            nothing else was asked for.
    """
    evidence = profile.evidence.prompts[: len(workload.prompts)]
    if not evidence:
        return f"{source} has no evidence to compare counts with: it was not measured; run autotune search on this device, or give --against"
    changed = [
        prompt.name for prompt, then in zip(workload.prompts, evidence, strict=False) if prompt.sha256 != then.sha256
    ]
    if not changed:
        return evidence
    is_same = workload.name == profile.workload.name
    what = (
        f"{len(changed)} of its first {len(evidence)} prompts are others"
        if is_same
        else f"judged on {profile.workload.name}"
    )
    if is_same or is_needed:
        raise NotComparable(
            f"{source} does not speak of these prompts of {workload.name}: {what} (the first is {changed[0]}); check the workload that it was searched with, or search again"
        )
    return f"the profile was judged on {profile.workload.name}, not on this workload"
