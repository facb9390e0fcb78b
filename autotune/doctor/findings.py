"""Sentences about a diagnosis: defects, and notes on what will be slow or uncertain."""

from __future__ import annotations

from autotune.device import gib
from autotune.doctor.diagnosis import Diagnosis, TargetFound
from autotune.execution import EAGER

MOST_ROUNDS = 1.25  # over eager rounds of the same tokens: rounding changes few trees
SLOW_SHARE = 0.5  # of the bandwidth, below which something else than memory bounds a plain step


def defects(diagnosis: Diagnosis) -> list[str]:
    """Differences between a verification and single steps that rounding does not explain."""
    target = diagnosis.target
    if target is None:
        return []
    texts = []
    check, ties = target.tree_check, target.near_ties
    if check.difference > check.allowed:
        texts.append(
            f"a tree's logits differ from token-by-token ones by {check.difference:.2g} standard deviations, more than the "
            f"{check.allowed:.2g} that this precision explains: outputs of speculative decoding will be wrong here"
        )
    if ties.num_unexplained:
        texts.append(
            f"{ties.num_unexplained} of {ties.num_tokens} argmaxes differ between verification and single steps by more than rounding "
            f"explains, for example {ties.examples[0]}"
        )
    captured = target.captured_steps
    if captured is not None and captured.difference > captured.allowed:
        texts.append(str(captured.why_eager))
    for trial in target.trials:
        name = f"{trial.draft or 'plain decoding'} in mode {trial.mode}"
        if trial.unexplained:
            texts.append(
                f"{name}: {len(trial.unexplained)} of {trial.num_answers} answers differ from eager plain decoding by more than "
                f"rounding explains, for example {trial.unexplained[0]}"
            )
        if (trial.rounds_over_eager or 1.0) > MOST_ROUNDS:
            texts.append(
                f"{name}: the same tokens take {trial.rounds_over_eager:.2f} times as many rounds as in mode {EAGER}: captured "
                "steps of the draft are wrong here"
            )
    return texts


def notes(diagnosis: Diagnosis) -> list[str]:
    """Expectations of a search on this machine."""
    texts = []
    device = diagnosis.examined
    if device.datasheet_gb_per_second is None and device.fingerprint.kind != "cpu":
        texts.append(
            f"no datasheet of {device.fingerprint.name}: searches measure here as elsewhere, but reports show no limits; add "
            f"profiles/devices/{device.fingerprint.name}.yaml"
        )
    if diagnosis.contention.is_busy:
        texts.append(
            f"the machine is busy ({diagnosis.contention.describe('meanwhile')}): times scatter; searches and measurements wait for "
            "an idle machine with --wait-until-idle"
        )
    if diagnosis.target is None:
        return [*texts, "no target was examined; name one with --target"]
    target = diagnosis.target
    texts += [*_attention_notes(target), *_precision_notes(target), *_mode_notes(target)]
    return texts + _time_notes(diagnosis, target)


def _attention_notes(target: TargetFound) -> list[str]:
    if not target.attention:
        return ["the model does not call torch's scaled dot-product attention: its own code attends"]
    texts = []
    for backend, consequence in (
        ("cudnn_attention", "it builds a plan for every new shape, and plain decoding has a new one for every token"),
        ("math", "it stores all scores, which is slow with long contexts"),
    ):
        forwards = sorted({use.forward for use in target.attention if use.backend == backend})
        if forwards:
            texts.append(f"attention of {' and '.join(forwards)} runs as {backend}: {consequence}")
    return texts


def _precision_notes(target: TargetFound) -> list[str]:
    ties, texts = target.near_ties, []
    if not target.has_native_precision:
        texts.append(f"the device emulates {target.precision}: another --dtype may be faster")
    if ties.num_flips > ties.num_unexplained:
        texts.append(
            f"{ties.num_flips - ties.num_unexplained} of {ties.num_tokens} argmaxes flip in near ties (noise {ties.noise:.2g}): outputs of speculative and "
            "plain decoding will differ there, and autotune check accepts it"
        )
    elif not ties.num_flips:
        texts.append(
            f"no argmax of {ties.num_tokens} flips: outputs should equal plain decoding (noise {ties.noise:.2g})"
        )
    if not target.is_tested:
        texts.append(
            f"text models of type {target.model_type!r} are not in the test suite; this one passed the self-check"
        )
    return texts


def _mode_notes(target: TargetFound) -> list[str]:
    texts = []
    if (captured := target.captured_steps) is not None:
        differences = (
            f"at {captured.num_tokens} tokens, captured steps differ from eager ones by at most {captured.difference:.2g} standard "
            f"deviations of the logits (allowed: {captured.allowed:.2g}), and {captured.num_near_ties} argmaxes flip in near ties"
        )
        texts.append(f"mode auto is {target.mode}: {captured.why_eager or differences}")
    for trial in target.trials:
        name = f"{trial.draft or 'plain decoding'} in mode {trial.mode}"
        if trial.rounds_over_eager not in (None, 1.0):
            ratio = f"{trial.rounds_over_eager:.2f} times as many rounds as in mode {EAGER}"
            texts.append(f"{name}: the same tokens take {ratio}, because rounding changes trees")
        if trial.why_eager is not None:
            texts.append(f"{name} runs eagerly: {trial.why_eager}")
    return texts


def _time_notes(diagnosis: Diagnosis, target: TargetFound) -> list[str]:
    texts = []
    for times in target.steps:
        prices = ", ".join(f"{tokens}: {ms / times.plain_ms:.2f}" for tokens, ms in sorted(times.verify_ms.items()))
        texts.append(
            f"mode {times.mode}: a plain step takes {times.plain_ms:.2f} ms; a verification of n tokens, in plain steps, {prices}: this many "
            "tokens per round pay for it alone"
        )
    limit = diagnosis.examined.datasheet_gb_per_second or diagnosis.copy_gb_per_second
    for times in target.steps:
        rate = target.step_gb_per_second(times)
        if rate < SLOW_SHARE * limit:
            cause = "kernel launches or the arithmetic" if times.mode == EAGER else "small kernels or the arithmetic"
            texts.append(
                f"mode {times.mode}: a plain step reads {rate:.1f} GB/s, {100 * rate / limit:.0f} % of {limit:.3g} GB/s: {cause} take the rest"
            )
        if times.why_eager is not None:
            texts.append(f"mode {times.mode} fails here and runs eagerly: {times.why_eager}")
        if times.prepare_s is not None:
            texts.append(
                f"mode {times.mode} prepares {times.num_prepared} forward passes in {times.prepare_s:.1f} s and {gib(times.prepared_bytes)}"
            )
    free = diagnosis.examined.free_bytes
    tokens = int(free / max(1, target.kv_bytes_per_token))
    texts.append(f"{gib(free)} are free next to the weights: keys and values of {tokens:,} tokens")
    return texts
