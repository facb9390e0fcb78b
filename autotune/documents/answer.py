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
from autotune.documents.deployment import RUNTIME, BackendResult
from autotune.documents.subnet import Subnet

COLUMNS = 80
"""Most characters of a line. Only the path of a file can make a line longer, because commands are copied."""
JUDGING, DECIDING = 16, 8
"""Held-out prompts and prompts of finalists, with fewer of which an answer is called a guess."""


def answer_of(profile: DecodingProfile, path: Path) -> list[str]:
    """The answer of a search in three to six lines of at most ``COLUMNS`` characters.

    Args:
        profile: measured, or predicted for another device or for a server that was not started.
        path: the file of the profile, for the next command.
    """
    command = shlex.quote(str(path))
    chosen = profile.point if _drafts(profile.point) else None
    gain = _over_plain(profile, chosen)
    is_plain = chosen is None or gain.speedup < 1.0
    if profile.backend != RUNTIME:
        lines = _engine_choice(profile, gain)
    elif is_plain or chosen is None:
        lines = ["Plain decoding is the fastest" + (": use Hugging Face's generate." if gain.over == HF else ".")]
        lines = ["Deploy the runtime, without a draft."] if profile.evidence.backends else lines
        lines += [f"The fastest draft is {_times(gain)} as fast."] if gain.num_prompts else []
    else:
        doubt = ", perhaps by chance" if _interval(gain)[0] <= 1.0 else ""
        plain = "Hugging Face" if gain.over == HF else "plain decoding"
        lines = [*_choice(profile, chosen), f"{_times(gain)} as fast as {plain}{doubt}."]
        lines += [] if profile.evidence.backends else _over_default(profile.evidence)
    lines += _other_backends(profile.evidence.backends)
    if profile.point.measured is None:
        return [*lines, *_unmeasured(profile)]
    num_deciding = DECIDING if profile.evidence.shrinkage is None else profile.evidence.shrinkage.num_runs or DECIDING
    num_prompts = len(profile.evidence.prompts)
    guess = ", a guess" if num_prompts < JUDGING else ""
    guess += f", chosen by {num_deciding}" if num_deciding < DECIDING else ""
    basis = _line(f"Measured on {_prompts(num_prompts, 'held-out ')} of {{}}{guess}.", profile.workload.name)
    more = "a larger --budget" if profile.workload.num_evaluate_prompts >= JUDGING else "more prompts"
    further = f"the same search with {more}" if guess else f"autotune bench {command}"
    is_alone = is_plain and profile.backend == RUNTIME
    following = "search with another --draft" if is_alone else f"autotune run {command}"
    return [*lines, basis, f"Next: {following}, or {further}."]


def _drafts(point: OperatingPoint) -> bool:
    """Whether a point speculates."""
    return point.draft is not None or (point.deployment is not None and point.deployment.speculation is not None)


def _unmeasured(profile: DecodingProfile) -> list[str]:
    """The basis of an estimate, and how to measure it."""
    if profile.backend != RUNTIME:
        basis = _line("Not measured: estimated on {} for {}.", profile.hardware.model, profile.workload.name)
        return [basis, "Next: the same search without the url measures it."]
    is_estimated = profile.point.predicted is not None and profile.point.predicted.estimated
    source = "the datasheet" if is_estimated else "a measured table"
    text = f"Estimated from {source} of {{}} and {_prompts(profile.workload.num_tune_prompts)}."
    following = "Next: the same search on that device, without --gpu, measures the profile."
    return [_line(text, profile.hardware.model), following]


def _engine_choice(profile: DecodingProfile, gain: Gain) -> list[str]:
    """The settings of an engine and their gain, or that its speculation is to be left off."""
    deployment = profile.point.deployment
    assert deployment is not None
    is_raced = bool(profile.evidence.backends)
    if deployment.speculation is None:
        compared = [arm for arm in profile.evidence.compared if arm.name != AR]
        best = max(compared, key=lambda arm: arm.speedup, default=None)
        text = (
            f"Deploy {deployment.backend} with {{}}, speculation off."
            if is_raced
            else f"Leave speculation off in {deployment.backend}."
        )
        lines = [_line(text, *[deployment.model.id] * is_raced)]
        return [*lines, _line(f"At best, {{}} is {_times(gain)} as fast.", best.name)] if best else lines
    draft = deployment.speculation.model
    drafted = _line(" drafted by {}", draft, columns=40) if draft else ""
    default = ", by its defaults" if deployment.speculation.is_default else ""
    if is_raced:
        first = _line(f"Deploy {deployment.backend} with {{}}: {deployment.label}.", deployment.model.id)
    else:
        first = f"Chosen for {deployment.backend}: {deployment.label}{drafted}{default}."
    return [first, f"{_times(gain)} as fast as no speculation."]


def _other_backends(backends: Sequence[BackendResult]) -> list[str]:
    """How long the other backends took, and what backends with other weights would save."""
    deployed = next((result for result in backends if result.is_deployed), None)
    if deployed is None:
        return []
    lines = []
    others = [result for result in backends if result is not deployed and not result.failure]
    known = [
        (result.is_slower, f"{result.backend} {result.seconds / deployed.seconds:.2f}")
        for result in others
        if result.has_own_weights
    ]
    slower = ", ".join(text for is_slower, text in known if is_slower)
    undecided = ", ".join(text for is_slower, text in known if not is_slower)
    times = [slower] * bool(slower) + [f"perhaps by chance {undecided}"] * bool(undecided)
    if times:
        lines.append(_line("Relative times: {}.", "; ".join(times)))
    faster = [result for result in others if not result.has_own_weights and result.seconds < deployed.seconds]
    if faster and not deployed.has_own_weights:
        return lines
    for result in sorted(faster, key=lambda result: result.seconds)[:1]:
        text = f"{{}} ({result.precision}) takes {result.seconds / deployed.seconds:.2f}, {100 * result.agreement:.0f} % alike: --any-weights."
        lines.append(_line(text, result.backend))
    return lines


def _over_plain(profile: DecodingProfile, chosen: OperatingPoint | None) -> Gain:
    """The gain over the fastest plain decoding that was measured, or the predicted one; of no prompts where the profile
    does not know it.
    """
    gains = {gain.over: gain for gain in profile.evidence.gains if gain.task == ALL}
    over = HF if any(arm.name == HF and arm.speedup > 1.0 for arm in profile.evidence.compared) else AR
    if over in gains:
        return gains[over]
    if profile.evidence.engine is not None and not profile.evidence.gains:
        predicted = profile.evidence.engine.predicted[0]
        return _gain(predicted.speedup, predicted.ci95)
    if chosen is None:
        return _gain(1.0, None)
    if chosen.measured is not None:
        return _gain(chosen.measured.speedup, chosen.measured.ci95, chosen.measured.num_prompts)
    return (
        _gain(1.0, None) if chosen.predicted is None else _gain(chosen.predicted.speedup, chosen.predicted.interval90)
    )


def _gain(speedup: float, interval: tuple[float, float] | None, num_prompts: int = 0) -> Gain:
    return Gain(task=ALL, over=AR, speedup=speedup, ci95=interval or (speedup, speedup), num_prompts=num_prompts)


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


def _choice(profile: DecodingProfile, point: OperatingPoint) -> list[str]:
    """The draft, the tree policy and the draft's subnet in words, in one or two lines."""
    assert point.draft is not None and point.tree is not None
    is_raced = bool(profile.evidence.backends)
    chosen = "Deploy the runtime" if is_raced else "Chosen"
    kind = "" if point.draft.kind == point.draft.id else f" ({point.draft.kind})"
    shape = f"{'' if point.lossless else 'lossy '}{'chains' if point.tree.is_chain else f'{point.tree.policy} trees'}"
    words = [f"{shape} of up to {point.tree.max_nodes} tokens", *_subnet(point.draft.subnet)]
    if is_raced:
        return [_line(f"{chosen}: {{}}{kind}, {words[0]}.", point.draft.id)]
    text = _line(f"{chosen}: {{}}{kind}, {', '.join(words)}.", point.draft.id, columns=2 * COLUMNS - 10)
    return textwrap.wrap(text, COLUMNS, break_on_hyphens=False)


def _subnet(subnet: Subnet) -> list[str]:
    """The choices of a subnet that differ from the whole draft, in words."""
    shares = "/".join(f"{100 * share:g}" for share in subnet.head_shares[: 1 if isinstance(subnet.heads, float) else 3])
    operator = " by ".join(f"{part}" for part in (subnet.operator, subnet.operator_ratio) if part is not None)
    words = {
        f"{100 * subnet.visual_keep:g} % of visual tokens": subnet.visual_keep < 1.0,
        f"target layer {subnet.injection_layer}": subnet.injection_layer is not None,
        f"{shares} % of heads": subnet.heads not in (None, 1.0),
        f"operator {operator}": subnet.operator is not None,
        f"{100 * (subnet.vocabulary or 1.0):g} % of vocabulary": subnet.vocabulary is not None,
        f"{subnet.weights}": subnet.weights is not None,
    }
    return [text for text, is_chosen in words.items() if is_chosen]


def _over_default(evidence: Evidence) -> list[str]:
    """The gain over the best published default, where one is known."""
    gains = [gain for gain in evidence.gains if gain.task == ALL and gain.over == evidence.best_default]
    if gains and _interval(gains[0])[0] > 1.0:
        return [f"{_times(gain)} as fast as {gain.over}, the best default." for gain in gains]
    texts = ["it is the same" if gain.ci95 == (1.0, 1.0) else _times(gain) for gain in gains]
    return [f"Not better than the best default, {evidence.best_default}: {text}." for text in texts]


def _line(text: str, *names: str, columns: int = COLUMNS) -> str:
    """A line with names in the places of its braces; names that do not fit lose their middles."""
    room = columns - len(text.format(*[""] * len(names)))
    longest = next((n for n in range(columns, 6, -1) if sum(min(len(name), n) for name in names) <= room), 6)
    short = (
        name if len(name) <= longest else f"{name[: longest // 2 - 1]}...{name[2 - longest // 2 :]}" for name in names
    )
    return text.format(*short)
