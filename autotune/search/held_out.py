"""The evaluation of the runtime's profile on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile, Differences, OperatingPoint, Shrinkage
from autotune.evaluation.divergence import divergences_from_plain
from autotune.evaluation.runtime_arms import DecoderArm
from autotune.evaluation.summary import summarize
from autotune.search.evidence import Evaluation, measured_point
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
    """The profile with its measured points and its evidence; it decodes plainly, by ``plain_point``, where that is
    faster.
    """
    runs = evaluation.runs
    is_faster = evaluation.summaries[TUNED].speedup >= 1.0
    points = [plain_point.model_copy(update={"measured": evaluation.measured(AR)})]
    if is_faster:
        measured = [measured_point(number, runs[TUNED], runs[AR]) for number in range(len(profile.points))]
        points = [p.model_copy(update={"measured": m}) for p, m in zip(profile.points, measured, strict=True)]
    evidence = evaluation.evidence(TUNED if is_faster else AR)
    evidence |= {"shrinkage": shrinkage, "differences": evaluation.differences if is_faster else None}
    return profile.model_copy(update={"points": points, "evidence": profile.evidence.model_copy(update=evidence)})


def shrinkage_of(
    winner: MeasuredConfiguration, evaluation: Evaluation, num_points: int, prompts: TuningPrompts
) -> Shrinkage:
    """How the speedup of the winner, the last of ``num_points`` operating points, shrank from the prompts that chose it
    to those that did not.
    """
    pairs = list(zip(evaluation.runs[TUNED], evaluation.runs[AR], strict=True))
    winner_pairs = [pair for pair in pairs if pair[0].point == num_points - 1]  # without the prompts of other points
    return Shrinkage(
        predicted_on_choosing=prompts.choosing.speedup(winner.configuration),
        predicted_on_confirming=prompts.confirming.speedup(winner.configuration),
        measured_on_confirming=winner.speedup,
        num_runs=winner.num_runs,
        measured_on_held_out=summarize(TUNED, *map(list, zip(*(winner_pairs or pairs), strict=True))).speedup,
    )
