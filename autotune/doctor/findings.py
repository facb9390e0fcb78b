"""Sentences about a diagnosis: defects, and notes on what will be slow or uncertain."""

from __future__ import annotations

from typing import NamedTuple

from autotune.doctor.diagnosis import Diagnosis, TargetFound
from autotune.documents.captured_steps import CapturedSteps
from autotune.machine.device import gib

SLOW_SHARE = 0.5  # of the bandwidth, below which something else than memory bounds a plain step
CONSEQUENCES = {
    "cudnn_attention": "it builds a plan for every new shape, and plain decoding has a new one for every token",
    "math": "it stores all scores, which is slow with long contexts",
}
"""By torch's kernels of attention, those that are slow."""


class Finding(NamedTuple):
    """A sentence about a diagnosis."""

    applies: bool
    text: str
    is_defect: bool = False


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """All findings that apply, in the order in which they are printed."""
    device, target = diagnosis.examined, diagnosis.target
    name = device.fingerprint.name
    found = [
        Finding(
            device.datasheet_gb_per_second is None and device.fingerprint.kind != "cpu",
            f"no datasheet of {name}: searches measure here as elsewhere, but reports show no limits; "
            f"add profiles/devices/{name}.yaml",
        ),
        Finding(
            diagnosis.contention.is_busy,
            f"the machine is busy ({diagnosis.contention.describe('meanwhile')}): times scatter; searches and "
            "measurements wait for an idle machine with --wait-until-idle",
        ),
    ]
    if target is not None:
        found += [*_of_attention(target), *_of_precision(target), *_of_times(diagnosis, target)]
    return [finding for finding in found if finding.applies]


def _of_attention(target: TargetFound) -> list[Finding]:
    captured = target.captured_steps or CapturedSteps()
    kernels = f"with masks: {target.why_masks}" if target.why_masks else "in Triton kernels"
    differences = (
        f"at {captured.num_tokens} tokens, captured steps differ from eager ones by at most {captured.difference:.2g} "
        f"standard deviations of the logits (allowed: {captured.allowed:.2g}), and {captured.num_near_ties} argmaxes "
        "flip in near ties"
    )
    return [
        Finding(
            not target.attention, "the model does not call torch's scaled dot-product attention: its own code attends"
        ),
        *(
            Finding(
                any(use.backend == backend for use in target.attention), f"attention runs as {backend}: {consequence}"
            )
            for backend, consequence in CONSEQUENCES.items()
        ),
        Finding(target.captured_steps is not None, f"captured steps run attention {kernels}"),
        Finding(captured.difference > captured.allowed, str(captured.why_eager), is_defect=True),
        Finding(target.captured_steps is not None, f"mode auto is {target.mode}: {captured.why_eager or differences}"),
    ]


def _of_precision(target: TargetFound) -> list[Finding]:
    tree, ties = target.tree_check, target.near_ties
    return [
        Finding(
            tree.difference > tree.allowed,
            f"a tree's logits differ from token-by-token ones by {tree.difference:.2g} standard deviations, more than "
            f"the {tree.allowed:.2g} that this precision explains: outputs of speculative decoding will be wrong here",
            is_defect=True,
        ),
        Finding(
            ties.num_unexplained > 0,
            f"{ties.num_unexplained} of {ties.num_tokens} argmaxes differ between verification and single steps by "
            f"more than rounding explains, for example {ties.example}",
            is_defect=True,
        ),
        Finding(
            not target.has_native_precision, f"the device emulates {target.precision}: another --dtype may be faster"
        ),
        Finding(
            True,
            f"{ties.num_flips - ties.num_unexplained} of {ties.num_tokens} argmaxes flip in near ties (noise "
            f"{ties.noise:.2g}): where one flips, outputs may differ from plain decoding, and autotune check accepts it",
        ),
        Finding(
            not target.is_tested,
            f"text models of type {target.model_type!r} are not in the test suite; this one passed the self-check",
        ),
    ]


def _of_times(diagnosis: Diagnosis, target: TargetFound) -> list[Finding]:
    limit = diagnosis.examined.datasheet_gb_per_second or diagnosis.copy_gb_per_second
    free_bytes = diagnosis.examined.free_bytes
    num_tokens = int(free_bytes / max(1, target.kv_bytes_per_token))
    found = [Finding(True, f"{gib(free_bytes)} are free: keys and values of {num_tokens:,} tokens")]
    for times in target.steps:
        rate = target.step_gb_per_second(times)
        found += [
            Finding(
                rate < SLOW_SHARE * limit,
                f"mode {times.mode}: a plain step reads {rate:.1f} GB/s, {100 * rate / limit:.0f} % of {limit:.3g} "
                "GB/s: launches of kernels or arithmetic take the rest",
            ),
            Finding(times.why_eager is not None, f"mode {times.mode} fails here and runs eagerly: {times.why_eager}"),
        ]
    return found
