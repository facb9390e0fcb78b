"""The answer of a search in a few sentences: what was chosen, its gain and over what, the evidence, and the next
command.

A search prints the sentences as its last block, and the report of its profile begins with them.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from autotune.documents.decoding_profile import ALL, AR, HF, DecodingProfile, Evidence, Gain, OperatingPoint
from autotune.documents.deployment import RUNTIME, BackendResult, EngineEvidence

COLUMNS = 80
"""Most characters of a line, unless a name or a command is longer."""
JUDGING, DECIDING = 16, 8
"""Held-out prompts and prompts of finalists, with fewer of which an answer is called a guess."""


def answer_of(profile: DecodingProfile, path: Path) -> list[str]:
    """The answer of a search in three to seven lines.

    Args:
        profile: measured, or predicted for another device or for a server that was not started.
        path: the file of the profile, for the next command.
    """
    gain, point = _over_plain(profile), profile.point
    speculates = point.draft is not None or (point.deployment is not None and point.deployment.speculation is not None)
    is_plain = not speculates or (profile.backend == RUNTIME and gain.speedup < 1.0)
    if not is_plain:
        doubt = ", perhaps by chance" if _interval(gain)[0] <= 1.0 else ""
        over = "Hugging Face" if gain.over == HF else "plain decoding"
        sentences = [f"{_subject(profile)}: {_settings(point)}.", f"{_times(gain)} as fast as {over}{doubt}."]
        sentences += _over_default(profile.evidence)
    else:
        plain = "plain decoding" + (", by Hugging Face's generate" if gain.over == HF else "")
        sentences = [f"{_subject(profile)}: {plain}."]
        sentences += [f"The fastest speculation is {_times(gain)} as fast."] if gain.num_prompts else []
    sentences += [*_by_load(profile.evidence.engine), *_other_backends(profile.evidence.backends)]
    basis, following = _basis(profile, shlex.quote(str(path)), is_plain=is_plain)
    lines = [textwrap.wrap(text, COLUMNS, break_on_hyphens=False, break_long_words=False) for text in sentences]
    return [*(line for wrapped in lines for line in wrapped), basis, f"Next: {following}."]


def _basis(profile: DecodingProfile, path: str, *, is_plain: bool) -> tuple[str, str]:
    """The evidence, and what to do next."""
    workload, evidence = profile.workload, profile.evidence
    if profile.point.measured is None:
        prompts = _prompts(workload.num_tune_prompts)
        without = "on that device, without --gpu," if profile.backend == RUNTIME else "without the url"
        return (
            f"Not measured: estimated for {profile.hardware.model} by {prompts}.",
            f"the same search {without} measures it",
        )
    num_prompts, num_deciding = len(evidence.prompts), evidence.num_deciding
    is_guess = num_prompts < JUDGING
    guess = ", a guess" if is_guess else ""
    if num_deciding is not None and num_deciding < DECIDING:
        guess, is_guess = f"{guess}, chosen by {num_deciding}", True
    more = "a larger --budget" if workload.num_evaluate_prompts >= JUDGING else "more prompts"
    further = f"the same search with {more}" if is_guess else f"autotune bench {path}"
    first = "search with another --draft" if is_plain and profile.backend == RUNTIME else f"autotune run {path}"
    return (f"Measured on {_prompts(num_prompts, 'held-out ')} of {workload.name}{guess}.", f"{first}, or {further}")


def _subject(profile: DecodingProfile) -> str:
    """The beginning of the first sentence: the backend to deploy where several were raced."""
    deployment, is_raced = profile.point.deployment, bool(profile.evidence.backends)
    if deployment is None:
        return "Deploy the runtime" if is_raced else "Chosen"
    return f"Deploy {deployment.backend} with {deployment.model.id}" if is_raced else f"Chosen for {deployment.backend}"


def _settings(point: OperatingPoint) -> str:
    """The settings of an engine, or the draft, the tree policy and the draft's subnet in words."""
    if point.deployment is not None and point.deployment.speculation is not None:
        speculation = point.deployment.speculation
        model = f" drafted by {speculation.model}" if speculation.model else ""
        return f"{speculation.label}{model}{', by its defaults' if speculation.is_default else ''}"
    assert point.draft is not None and point.tree is not None
    kind = "" if point.draft.kind == point.draft.id else f" ({point.draft.kind})"
    shape = f"{'' if point.verification.is_lossless else 'lossy '}{'chains' if point.tree.is_chain else f'{point.tree.policy} trees'}"
    subnet = point.draft.subnet.label and f", {point.draft.subnet.label}"
    return f"{point.draft.id}{kind}, {shape} of up to {point.tree.size.nodes} tokens{subnet}"


def _over_default(evidence: Evidence) -> list[str]:
    """The gain over the best published default of the runtime, where one is known and no backends were raced."""
    if evidence.backends or evidence.engine is not None:
        return []
    gains = [gain for gain in evidence.gains if gain.task == ALL and gain.over == evidence.best_default]
    if gains and _interval(gains[0])[0] > 1.0:
        return [f"{_times(gain)} as fast as {gain.over}, the best default." for gain in gains]
    texts = ["it is the same" if gain.ci95 == (1.0, 1.0) else _times(gain) for gain in gains]
    return [f"Not better than the best default, {evidence.best_default}: {text}." for text in texts]


def _by_load(engine: EngineEvidence | None) -> list[str]:
    """The best depths by the number of requests at once."""
    if engine is None or not engine.schedule:
        return []
    (_, _, least), *others = engine.schedule
    changes = [f"{depth or 'off'} above {first - 1}" for first, _, depth in others]
    changes = changes or [f"up to {engine.loads[-1].at_once}"]
    return [f"Best by load: {f'depth {least}' if least else 'off'}, {', '.join(changes)} requests at once."]


def _other_backends(backends: Sequence[BackendResult]) -> list[str]:
    """How long the other backends took, and what the fastest backend with other weights would save."""
    deployed = next((result for result in backends if result.is_deployed), None)
    if deployed is None:
        return []
    others = [result for result in backends if result is not deployed and not result.failure]
    times = [
        f"{result.backend} {result.seconds / deployed.seconds:.2f}{'' if result.is_slower else ' (perhaps by chance)'}"
        for result in others
        if result.has_own_weights
    ]
    sentences = [f"Relative times: {', '.join(times)}."] if times else []
    faster = [result for result in others if not result.has_own_weights and result.seconds < deployed.seconds]
    if faster and deployed.has_own_weights:
        best = min(faster, key=lambda result: result.seconds)
        share = f"takes {best.seconds / deployed.seconds:.2f}, {100 * best.agreement:.0f} % alike"
        sentences.append(f"{best.backend} ({best.precision}) {share}: --any-weights.")
    return sentences


def _over_plain(profile: DecodingProfile) -> Gain:
    """The gain over the fastest plain decoding that was measured, or the predicted one; of no prompts where the profile
    does not know it.
    """
    evidence, predicted = profile.evidence, profile.point.predicted
    gains = {gain.over: gain for gain in evidence.gains if gain.task == ALL}
    over = HF if any(arm.name == HF and arm.speedup > 1.0 for arm in evidence.compared) else AR
    if over in gains:
        return gains[over]
    speedup, interval = 1.0, None
    if evidence.engine is not None:
        speedup, interval = evidence.engine.predicted[0].speedup, evidence.engine.predicted[0].ci95
    elif predicted is not None:
        speedup, interval = predicted.speedup, predicted.interval90
    return Gain(task=ALL, over=AR, speedup=speedup, ci95=interval or (speedup, speedup), num_prompts=0)


def _interval(gain: Gain) -> tuple[float, float]:
    """The gain's interval. Bootstrap intervals of few prompts are too short, and are widened as Student's t is wider
    than a normal distribution (Hesterberg, 2015).
    """
    if not 0 < gain.num_prompts < JUDGING:
        return gain.ci95
    if gain.num_prompts == 1:
        return 0.0, math.inf
    from scipy.stats import norm, t

    quantiles = t.ppf(0.975, gain.num_prompts - 1) / norm.ppf(0.975)
    factor = quantiles * (gain.num_prompts / (gain.num_prompts - 1)) ** 0.5
    low, high = (gain.speedup * (end / gain.speedup) ** factor for end in gain.ci95)
    return low, high


def _times(gain: Gain) -> str:
    """A gain with its interval, and the number of prompts where it is small."""
    low, high = _interval(gain)
    words = [f"{low:.2f} to {high:.2f}"] if low < high else []
    words += [f"on {_prompts(gain.num_prompts)}"] if 0 < gain.num_prompts < JUDGING else []
    return f"{gain.speedup:.2f}x" + (f" ({' '.join(words)})" if words else "")


def _prompts(number: int, kind: str = "") -> str:
    return f"{number} {kind}prompt{'' if number == 1 else 's'}"
