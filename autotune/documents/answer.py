"""The answer of a search in a few sentences: what was chosen, its gain and over what, the evidence, and the next
command.

A search prints the sentences as its last block, and the report of its profile begins with them.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from pathlib import Path

from autotune.documents.decoding_profile import ALL, AR, HF, DecodingProfile, Evidence, Gain, OperatingPoint
from autotune.documents.engine_profile import EngineProfile
from autotune.documents.subnet import Subnet

COLUMNS = 80
"""Most characters of a line. Only the path of a file can make a line longer, because commands are copied."""
JUDGING, DECIDING = 16, 8
"""Held-out prompts and prompts of finalists, with fewer of which an answer is called a guess."""


def answer_of(profile: DecodingProfile, path: Path) -> list[str]:
    """The answer of a search in three to six lines of at most ``COLUMNS`` characters.

    Args:
        profile: measured, or predicted for another device.
        path: the file of the profile, for the next command.
    """
    evidence, command = profile.evidence, shlex.quote(str(path))
    is_measured = any(point.measured for point in profile.points)
    chosen = next((point for point in reversed(profile.points) if point.draft is not None), None)
    gain = _over_plain(profile, chosen)
    plain = "Hugging Face" if gain.over == HF else "plain decoding"
    if is_plain := chosen is None or gain.speedup < 1.0:
        lines = ["Plain decoding is the fastest" + ("." if gain.over == AR else f": use {plain}'s generate.")]
        lines += [f"The fastest draft is {_times(gain)} as fast."] if gain.num_prompts else []
    else:
        doubt = ", perhaps by chance" if _interval(gain)[0] <= 1.0 else ""
        lines = [*_choice(profile, chosen), f"{_times(gain)} as fast as {plain}{doubt}.", *_over_default(evidence)]
    if is_measured:
        num_deciding = DECIDING if evidence.shrinkage is None else evidence.shrinkage.num_runs or DECIDING
        guess = ", a guess" if len(evidence.prompts) < JUDGING else ""
        guess += f", chosen by {num_deciding}" if num_deciding < DECIDING else ""
        text = f"Measured on {_prompts(len(evidence.prompts), 'held-out ')} of {{}}{guess}."
        basis = _line(text, profile.workload.name)
        more = "a larger --budget" if profile.workload.num_evaluate_prompts >= JUDGING else "more prompts"
        further = f"the same search with {more}" if guess else f"autotune bench {command}"
        following = f"{'search with another --draft' if is_plain else f'autotune run {command}'}, or {further}"
    else:
        is_estimated = any(point.predicted and point.predicted.estimated for point in profile.points)
        source = "the datasheet" if is_estimated else "a measured table"
        text = f"Estimated from {source} of {{}} and {_prompts(profile.workload.num_tune_prompts)}."
        basis = _line(text, profile.hardware.model)
        following = "the same search on that device, without --gpu, measures the profile"
    return [*lines, basis, f"Next: {following}."]


def answer_of_engine(profile: EngineProfile, path: Path) -> list[str]:
    """The answer of a search in an engine. The profile holds the command that starts its server."""
    chosen, command = profile.speculation, shlex.quote(str(path))
    if profile.arms:
        best = max(profile.arms[1:], key=lambda arm: arm.measured)
        label, gain = best.label, _gain(best.measured, best.ci95, best.timed)
        guess = ", a guess" if best.timed < JUDGING else ""
        basis = _line(f"Measured on {_prompts(best.timed, 'held-out ')} of {{}}{guess}.", profile.workload)
        following = f"autotune run {command} --prompt TEXT starts its server and answers"
    else:
        label = profile.fastest[0].speculation.label
        gain = _gain(profile.fastest[0].speedup, profile.fastest[0].ci95)
        basis = _line("Not measured: estimated on {} for {}.", profile.hardware.model, profile.workload)
        following = "the same search without --url measures it"
    if chosen is None:
        lines = [f"Leave speculation off in {profile.engine}.", f"At best, {label} is {_times(gain)} as fast."]
    else:
        draft = _line(" drafted by {}", chosen.model, columns=40) if chosen.model else ""
        default = ", by its defaults" if chosen.is_default else ""
        lines = [f"Chosen for {profile.engine}: {chosen.label}{draft}{default}."]
        lines.append(f"{_times(gain)} as fast as no speculation.")
    return [*lines, basis, f"Next: {following}."]


def _over_plain(profile: DecodingProfile, chosen: OperatingPoint | None) -> Gain:
    """The gain over the fastest plain decoding that was measured, or the predicted one; of no prompts where the profile
    does not know it.
    """
    gains = {gain.over: gain for gain in profile.evidence.gains if gain.task == ALL}
    over = HF if any(arm.name == HF and arm.speedup > 1.0 for arm in profile.evidence.compared) else AR
    if over in gains or chosen is None:
        return gains.get(over, _gain(1.0, None))
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
    chosen = "Chosen" if len(profile.points) == 1 else "Chosen for most requests"
    kind = "" if point.draft.kind == point.draft.id else f" ({point.draft.kind})"
    shape = f"{'' if point.lossless else 'lossy '}{'chains' if point.tree.is_chain else f'{point.tree.policy} trees'}"
    words = [f"{shape} of up to {point.tree.max_nodes} tokens", *_subnet(point.draft.subnet)]
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
