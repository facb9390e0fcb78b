"""The answer of a search in a few sentences: what was chosen, its gain and over what, the evidence, and the next
command.

A search prints the sentences as its last block, and the report of its profile begins with them.
"""

from __future__ import annotations

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
PLAIN = {AR: "plain decoding", HF: "Hugging Face's generate"}
"""Plain decoding by this program and by another one."""


def answer_of(profile: DecodingProfile, path: Path) -> list[str]:
    """The answer of a search in three to six lines of at most ``COLUMNS`` characters.

    Args:
        profile: measured, or predicted for another device.
        path: the file of the profile, for the next command.
    """
    chosen = next((point for point in reversed(profile.points) if point.draft is not None), None)
    if not any(point.measured for point in profile.points):
        return _predicted(profile, chosen)
    gain, num_prompts, shrinkage = _over_plain(profile), len(profile.evidence.prompts), profile.evidence.shrinkage
    is_guess = num_prompts < JUDGING
    if chosen is None or gain.speedup < 1.0:
        plain = "this profile has no draft" if gain.over == AR else "Hugging Face's generate, without this profile"
        lines = [f"Plain decoding is the fastest: {plain}."]
        if gain.num_prompts:
            lines.append(f"The fastest draft is {_times(gain)} as fast{', a guess' * is_guess}.")
    else:
        doubt = ", which may be chance" if _interval(gain)[0] <= 1.0 else ""
        than = f"as fast as {PLAIN[gain.over]}{', a guess' if is_guess else doubt}"
        lines = [*_choice(profile, chosen), f"{_times(gain)} {than}.", *_over_default(profile.evidence)]
    num_deciding = DECIDING if shrinkage is None or shrinkage.num_runs is None else shrinkage.num_runs
    guessed = f", chosen by {num_deciding}" if num_deciding < DECIDING else ""
    basis = f"Measured on {{}}: {num_prompts} held-out prompts of {{}}{guessed}."
    command = shlex.quote(str(path))
    further = "the same search with a larger --budget" if is_guess or guessed else f"autotune bench {command}"
    names = profile.hardware.model, profile.workload.name
    return [*lines, _line(basis, *names), f"Next: autotune run {command}, or {further}."]


def answer_of_engine(profile: EngineProfile, path: Path) -> list[str]:
    """The answer of a search in an engine. The profile holds the command that starts its server."""
    best = max(profile.arms[1:], key=lambda arm: arm.measured, default=None)
    command, again = shlex.quote(str(path)), "autotune bench with the same prompts"
    if best is None:
        first, again = profile.fastest[0], "the same search without --url"
        label, gain = first.speculation.label, _gain(first.speedup, first.ci95)
        basis = "Predicted on {} for prompts of {}: not measured."
    else:
        label, gain = best.label, _gain(best.measured, best.ci95, best.timed)
        guess = ", which is a guess" if best.timed < JUDGING else ""
        basis = f"Measured on {{}}: {best.timed} held-out prompts of {{}}{guess}."
    chosen, than = profile.speculation, f"{_times(gain)} as fast as no speculation"
    if chosen is None:
        lines = [f"Leave speculation off in {profile.engine}.", f"The fastest settings, {label}, are {than}."]
    else:
        draft = " with the draft {}" if chosen.model else ""
        default = ", by the defaults of its type" if chosen.is_default else ""
        text = f"Chosen for {profile.engine}: {chosen.label}{draft}."
        lines = [_line(text, *filter(None, [chosen.model])), f"{than}{default}."]
    basis = _line(basis, profile.hardware.model, profile.workload)
    return [*lines, basis, f"Next: autotune run {command} --prompt TEXT, or {again}."]


def _predicted(profile: DecodingProfile, chosen: OperatingPoint | None) -> list[str]:
    """The answer of a search for another device."""
    lines = ["Plain decoding is predicted to be the fastest: no draft gains."]
    if chosen is not None and chosen.predicted is not None:
        gain = _gain(chosen.predicted.speedup, chosen.predicted.interval90)
        lines = [*_choice(profile, chosen), f"{_times(gain)} as fast as plain decoding, predicted."]
        lines += _over_default(profile.evidence)
    is_estimated = any(point.predicted and point.predicted.estimated for point in profile.points)
    source = "Estimated for {} from its datasheet" if is_estimated else "Predicted for {} from a measured table"
    basis = f"{source} and {profile.workload.num_tune_prompts} prompts of {{}}: not measured."
    lines.append(_line(basis, profile.hardware.model, profile.workload.name))
    return [*lines, "Next: the same search on that device, without --gpu, measures the profile."]


def _over_plain(profile: DecodingProfile) -> Gain:
    """The gain over the fastest plain decoding that was measured; of no prompts where it is not known."""
    gains = {gain.over: gain for gain in profile.evidence.gains if gain.task == ALL}
    is_hf_faster = any(arm.name == HF and arm.speedup > 1.0 for arm in profile.evidence.compared)
    if (gain := gains.get(HF if is_hf_faster else AR)) is not None:
        return gain
    measured = profile.point.measured
    is_known = measured is not None and profile.point.draft is not None
    return _gain(measured.speedup, measured.ci95, measured.num_prompts) if measured and is_known else _gain(1.0, None)


def _gain(speedup: float, interval: tuple[float, float] | None, num_prompts: int = 0) -> Gain:
    return Gain(task=ALL, over=AR, speedup=speedup, ci95=interval or (speedup, speedup), num_prompts=num_prompts)


def _interval(gain: Gain) -> tuple[float, float]:
    """The gain's interval; of few prompts, whose bootstrap interval is too short, widened to that of Student's t
    (Hesterberg, 2015).
    """
    if not 1 < gain.num_prompts < JUDGING:
        return gain.ci95
    from scipy.special import stdtrit  # takes a moment to import

    degrees = gain.num_prompts - 1
    factor = float(stdtrit(degrees, 0.975)) / 1.96 * (1 + 1 / degrees) ** 0.5
    low, high = (gain.speedup * (end / gain.speedup) ** factor for end in gain.ci95)
    return low, high


def _times(gain: Gain) -> str:
    """A gain with its interval, and the number of prompts where it is small."""
    few = f" on {gain.num_prompts} prompts" if 0 < gain.num_prompts < JUDGING else ""
    low, high = _interval(gain)
    return f"{gain.speedup:.2f}x ({low:.2f} to {high:.2f}{few})" if low < high else f"{gain.speedup:.2f}x{few}"


def _choice(profile: DecodingProfile, point: OperatingPoint) -> list[str]:
    """The draft, the tree policy and the draft's subnet in words, in one or two lines."""
    draft, tree = point.draft, point.tree
    assert draft is not None and tree is not None
    chosen = "Chosen" if len(profile.points) == 1 else "Chosen for most requests"
    kind = "" if draft.kind == draft.id else f" ({draft.kind})"
    shape = "chains" if tree.is_chain else f"{tree.policy} trees"
    words = [f"{'' if point.lossless else 'lossy '}{shape} of up to {tree.max_nodes} tokens", *_subnet(draft.subnet)]
    text = f"{chosen}: {{}}{kind}, {', '.join(words)}."
    return textwrap.wrap(_line(text, draft.id, columns=2 * COLUMNS - 10), COLUMNS, break_on_hyphens=False)


def _subnet(subnet: Subnet) -> list[str]:
    """The choices of a subnet that differ from the whole draft, in words."""
    shares = [f"{100 * share:g}" for share in subnet.head_shares]
    shares = shares[:1] if len(set(shares)) == 1 else shares
    ratio = f" by {subnet.operator_ratio}" if subnet.operator_ratio else ""
    words = {
        f"{100 * subnet.visual_keep:g} % of visual tokens": subnet.visual_keep < 1.0,
        f"layer {subnet.injection_layer} of the target": subnet.injection_layer is not None,
        f"{'/'.join(shares)} % of heads": shares != ["100"],
        f"operator {subnet.operator}{ratio}": subnet.operator is not None,
        f"{100 * (subnet.vocabulary or 1.0):g} % of the vocabulary": subnet.vocabulary is not None,
        f"{subnet.weights} weights": subnet.weights is not None,
    }
    return [text for text, is_chosen in words.items() if is_chosen]


def _over_default(evidence: Evidence) -> list[str]:
    """The gain over the best published default, where one is known."""
    name = evidence.best_default
    gain = next((gain for gain in evidence.gains if gain.task == ALL and gain.over == name), None)
    if gain is None:
        return []
    if _interval(gain)[0] > 1.0:
        return [f"{_times(gain)} as fast as {name}, the best default."]
    same = "it is the same" if gain.ci95 == (1.0, 1.0) else _times(gain)
    return [f"Not better than the best default, {name}: {same}."]


def _line(text: str, *names: str, columns: int = COLUMNS) -> str:
    """A line with names in the places of its braces; names that do not fit lose their middles."""
    room = columns - len(text.format(*[""] * len(names)))
    longest = next((n for n in range(columns, 5, -1) if sum(min(len(name), n) for name in names) <= room), 5)
    return text.format(*(name if len(name) <= longest else _without_middle(name, longest) for name in names))


def _without_middle(name: str, length: int) -> str:
    return f"{name[: (length - 2) // 2]}...{name[-((length - 3) // 2) :]}"
