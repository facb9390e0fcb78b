"""The evaluation of the runtime's profile on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile, Differences, OperatingPoint, Shrinkage
from autotune.evaluation.divergence import divergences_from_plain
from autotune.evaluation.runtime_arms import DecoderArm
from autotune.search.evidence import Evaluation
from autotune.search.tuning_prompts import TuningPrompts
from autotune.study.document import MeasuredConfiguration
from autotune.workloads.workload import Workload


def differences_of(
    tuned: DecoderArm, workload: Workload, runs: Mapping[str, Sequence[Decoded]], deadline: float
) -> Differences:
    """Examine the answers of the profile that differ from plain decoding, until ``deadline`` of ``time.monotonic``."""
    num = sum(a.tokens_sha256 != b.tokens_sha256 for a, b in zip(runs[tuned.name], runs[AR], strict=True))
    decoded = tuned.arms.conversations.follow_all(workload.prompts[: len(runs[tuned.name]) if num else 0])
    longest_s = max(run.target_prefill_ms + run.decode_ms for run in runs[AR]) / 1e3  # an examination decodes plainly
    found = divergences_from_plain(tuned, decoded, runs[tuned.name], runs[AR], deadline - longest_s)
    is_exact = tuned.decoder.target.text.is_exact
    other = [f"{prompt}: {one}" for prompt, one in found.items() if is_exact or not one.is_near_tie]
    return Differences(rounding=len(found) - len(other), other=other, unexamined=num - len(found))


def with_evidence(
    profile: DecodingProfile, evaluation: Evaluation, shrinkage: Shrinkage, plain_point: OperatingPoint
) -> DecodingProfile:
    """The profile with its measured point and its evidence; it decodes plainly, by ``plain_point``, where that is
    faster.
    """
    is_faster = evaluation.summaries[TUNED].speedup >= 1.0
    point, name = (profile.point, TUNED) if is_faster else (plain_point, AR)
    point = point.model_copy(update={"measured": evaluation.measured(name)})
    evidence = evaluation.evidence(name)
    evidence |= {"shrinkage": shrinkage, "differences": evaluation.differences if is_faster else None}
    return profile.model_copy(update={"point": point, "evidence": profile.evidence.model_copy(update=evidence)})


def shrinkage_of(winner: MeasuredConfiguration, evaluation: Evaluation, prompts: TuningPrompts) -> Shrinkage:
    """How the speedup of the winner shrank from the prompts that chose it to those that did not."""
    return Shrinkage(
        predicted_on_choosing=prompts.choosing.speedup(winner.configuration),
        predicted_on_confirming=prompts.confirming.speedup(winner.configuration),
        measured_on_confirming=winner.speedup,
        num_runs=winner.num_runs,
        measured_on_held_out=evaluation.summaries[TUNED].speedup,
    )
