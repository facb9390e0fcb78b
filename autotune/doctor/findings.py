"""Sentences about a diagnosis: defects, and notes on what will be slow or uncertain."""

from __future__ import annotations

from typing import NamedTuple

from autotune.doctor.diagnosis import Diagnosis, TargetFound
from autotune.documents.captured_steps import CapturedSteps
from autotune.documents.execution import EAGER
from autotune.machine.device import gib

MOST_ROUNDS = 1.25  # over eager rounds of the same tokens: rounding changes few trees
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
    target = diagnosis.target
    found = _of_machine(diagnosis)
    if target is not None:
        found += [*_of_attention(target), *_of_precision(target), *_of_modes(target), *_of_times(diagnosis, target)]
    return [finding for finding in found if finding.applies]


def _of_machine(diagnosis: Diagnosis) -> list[Finding]:
    device, name = diagnosis.examined, diagnosis.examined.fingerprint.name
    return [
        Finding(
            device.datasheet_gb_per_second is None and device.fingerprint.kind != "cpu",
            f"no datasheet of {name}: searches measure here as elsewhere, but reports show no limits; add profiles/devices/{name}.yaml",
        ),
        Finding(
            diagnosis.contention.is_busy,
            f"the machine is busy ({diagnosis.contention.describe('meanwhile')}): times scatter; searches and measurements wait for "
            "an idle machine with --wait-until-idle",
        ),
        Finding(diagnosis.target is None, "no target was examined; name one with --target"),
    ]


def _of_attention(target: TargetFound) -> list[Finding]:
    forwards = {
        backend: sorted({use.forward for use in target.attention if use.backend == backend}) for backend in CONSEQUENCES
    }
    captured = f"with masks: {target.why_masks}" if target.why_masks else "in Triton kernels"
    return [
        Finding(
            not target.attention, "the model does not call torch's scaled dot-product attention: its own code attends"
        ),
        *(
            Finding(bool(names), f"attention of {' and '.join(names)} runs as {backend}: {CONSEQUENCES[backend]}")
            for backend, names in forwards.items()
        ),
        Finding(target.captured_steps is not None, f"captured steps run attention {captured}"),
    ]


def _of_precision(target: TargetFound) -> list[Finding]:
    tree, ties = target.tree_check, target.near_ties
    num_explained = ties.num_flips - ties.num_unexplained
    return [
        Finding(
            tree.difference > tree.allowed,
            f"a tree's logits differ from token-by-token ones by {tree.difference:.2g} standard deviations, more than the "
            f"{tree.allowed:.2g} that this precision explains: outputs of speculative decoding will be wrong here",
            is_defect=True,
        ),
        Finding(
            ties.num_unexplained > 0,
            f"{ties.num_unexplained} of {ties.num_tokens} argmaxes differ between verification and single steps by more than rounding "
            f"explains, for example {''.join(ties.examples[:1])}",
            is_defect=True,
        ),
        Finding(
            not target.has_native_precision, f"the device emulates {target.precision}: another --dtype may be faster"
        ),
        Finding(
            num_explained > 0,
            f"{num_explained} of {ties.num_tokens} argmaxes flip in near ties (noise {ties.noise:.2g}): outputs of speculative and "
            "plain decoding will differ there, and autotune check accepts it",
        ),
        Finding(
            not ties.num_flips,
            f"no argmax of {ties.num_tokens} flips: outputs should equal plain decoding (noise {ties.noise:.2g})",
        ),
        Finding(
            not target.is_tested,
            f"text models of type {target.model_type!r} are not in the test suite; this one passed the self-check",
        ),
    ]


def _of_modes(target: TargetFound) -> list[Finding]:
    """Findings on the self-test of captured steps, and on answers and rounds of every draft in every mode."""
    captured = target.captured_steps or CapturedSteps()
    differences = (
        f"at {captured.num_tokens} tokens, captured steps differ from eager ones by at most {captured.difference:.2g} standard "
        f"deviations of the logits (allowed: {captured.allowed:.2g}), and {captured.num_near_ties} argmaxes flip in near ties"
    )
    found = [
        Finding(captured.difference > captured.allowed, str(captured.why_eager), is_defect=True),
        Finding(target.captured_steps is not None, f"mode auto is {target.mode}: {captured.why_eager or differences}"),
    ]
    for trial in target.trials:
        name = f"{trial.draft or 'plain decoding'} in mode {trial.mode}"
        rounds = 1.0 if trial.rounds_over_eager is None else trial.rounds_over_eager
        more = f"{name}: the same tokens take {rounds:.2f} times as many rounds as in mode {EAGER}"
        found += [
            Finding(
                bool(trial.unexplained),
                f"{name}: {len(trial.unexplained)} of {trial.num_answers} answers differ from eager plain decoding by more than "
                f"rounding explains, for example {''.join(trial.unexplained[:1])}",
                is_defect=True,
            ),
            Finding(rounds > MOST_ROUNDS, f"{more}: captured steps of the draft are wrong here", is_defect=True),
            Finding(1.0 != rounds <= MOST_ROUNDS, f"{more}, because rounding changes trees"),
            Finding(trial.why_eager is not None, f"{name} runs eagerly: {trial.why_eager}"),
        ]
    return found


def _of_times(diagnosis: Diagnosis, target: TargetFound) -> list[Finding]:
    limit = diagnosis.examined.datasheet_gb_per_second or diagnosis.copy_gb_per_second
    free_bytes = diagnosis.examined.free_bytes
    found = []
    for times in target.steps:
        prices = ", ".join(f"{tokens}: {ms / times.plain_ms:.2f}" for tokens, ms in sorted(times.verify_ms.items()))
        rate = target.step_gb_per_second(times)
        cause = "kernel launches" if times.mode == EAGER else "small kernels"
        found += [
            Finding(
                True,
                f"mode {times.mode}: a plain step takes {times.plain_ms:.2f} ms; a verification of n tokens, in plain steps, {prices}: "
                "this many tokens per round pay for it alone",
            ),
            Finding(
                rate < SLOW_SHARE * limit,
                f"mode {times.mode}: a plain step reads {rate:.1f} GB/s, {100 * rate / limit:.0f} % of {limit:.3g} GB/s: {cause} or the "
                "arithmetic take the rest",
            ),
            Finding(times.why_eager is not None, f"mode {times.mode} fails here and runs eagerly: {times.why_eager}"),
            Finding(
                times.prepare_s is not None,
                f"mode {times.mode} prepares {times.num_prepared} forward passes in {times.prepare_s or 0.0:.1f} s and "
                f"{gib(times.prepared_bytes)}",
            ),
        ]
    num_tokens = int(free_bytes / max(1, target.kv_bytes_per_token))
    text = f"{gib(free_bytes)} are free next to the weights: keys and values of {num_tokens:,} tokens"
    return [*found, Finding(True, text)]
