"""What a profile chose, and why, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.acceptance.replay import plain_decode_ms
from autotune.documents.configuration import configuration_of
from autotune.documents.decoding_profile import AR, TUNED, ComparedArm, DecodingProfile, OperatingPoint
from autotune.documents.subnet import Subnet
from autotune.report.sources import Sources
from autotune.trees.static import StaticPolicy

FEW_PROMPTS = 8  # an interval that was resampled from fewer says little


@dataclass(frozen=True)
class ChosenPoint:
    """An operating point as the page shows it."""

    number: int
    when: str
    point: OperatingPoint
    words: str
    hyperparameters: list[tuple[str, str, str]]
    """Name, value, the paper's default."""
    is_of_few: bool
    """Its measurement stands on few prompts."""
    num_own: int
    """Recorded prompts that are decoded by it."""
    own_speedup: float | None
    """Predicted over them alone; the profile's prediction is over all."""


def chosen_points(sources: Sources) -> list[ChosenPoint]:
    """All of them, in the order in which requests try them."""
    profile = sources.profile
    return [
        ChosenPoint(
            number=number,
            when=when_of(profile, number),
            point=point,
            words=words_of(point),
            hyperparameters=hyperparameters(point),
            is_of_few=point.measured is not None and point.measured.num_prompts < FEW_PROMPTS,
            num_own=len(sources.prompts_of(number)),
            own_speedup=own_speedup(sources, number),
        )
        for number, point in enumerate(profile.points if profile is not None else [])
        if profile is not None
    ]


def own_speedup(sources: Sources, number: int) -> float | None:
    """Predicted over the recorded prompts that a point decodes; None where they, or their prices, are not at hand."""
    assert sources.profile is not None
    point = sources.profile.points[number]
    trace, prompts, evaluator = sources.trace_of(point), sources.prompts_of(number), sources.evaluator
    configuration = configuration_of(point)
    if trace is None or not prompts or evaluator is None or configuration is None:
        return None
    if not evaluator.can_replay(configuration):
        return None
    plain_ms = plain_decode_ms(trace, evaluator.prices[trace.header.draft.id, trace.header.subnet])
    return float(plain_ms[prompts].sum() / evaluator.replay(configuration).decode_ms[prompts].sum())


def when_of(profile: DecodingProfile, number: int) -> str:
    """The condition of a point, for people; the last of several takes what the others leave."""
    is_rest = 0 < number == len(profile.points) - 1
    return "any other request" if is_rest else profile.points[number].when.label


def words_of(point: OperatingPoint) -> str:
    """Draft, subnet, tree and fallback in a few sentences."""
    if point.draft is None or point.tree is None:
        return "The target decodes alone: no draft was faster here."
    tree = point.tree
    levels = f"{tree.max_depth} level{'s' * (tree.max_depth > 1)}"
    shape = f"at most {tree.max_nodes} drafted token{'s' * (tree.max_nodes > 1)} a round, in up to {levels}"
    if tree.max_width > 1:
        shape += f" of up to {tree.max_width} expanded nodes"
    sentences = [
        f"{point.draft.id} ({point.draft.kind}) drafts, {subnet_words(point.draft.subnet)}.",
        f"Its trees grow by {tree.policy}: {shape}.",
        "The output is the target's own, token for token."
        if point.lossless
        else f"The output is NOT the target's own: {point.verification.kind} verification is lossy.",
    ]
    if (price := point.fallback) is not None:
        sentences.append(
            "Where rounds do not pay, requests go on by plain steps: a round is priced at "
            f"{price.round_steps:.2f} of them, a draft level at {price.level_steps:.2f}, a drafted token at {price.node_steps:.3f}."
        )
    return " ".join(sentences)


def subnet_words(subnet: Subnet) -> str:
    """``with 75 % of its heads, reading layer 11 of the target, seeing all visual tokens``."""
    words = []
    shares = sorted(set(subnet.head_shares))
    if shares != [1.0]:
        words.append(f"with {' / '.join(f'{100 * share:g} %' for share in subnet_shares(subnet))} of its heads")
    if subnet.injection_layer is not None:
        words.append(f"reading layer {subnet.injection_layer} of the target")
    keep = subnet.visual_keep
    words.append("seeing all visual tokens" if keep == 1.0 else f"seeing {100 * keep:g} % of the visual tokens")
    return ", ".join(words)


def subnet_shares(subnet: Subnet) -> list[float]:
    """Of the blocks; one where all are alike."""
    shares = list(subnet.head_shares)
    return shares[:1] if len(set(shares)) == 1 else shares


def hyperparameters(point: OperatingPoint) -> list[tuple[str, str, str]]:
    """Of the tree, beside the paper's defaults."""
    if point.tree is None:
        return []
    if isinstance(point.tree, StaticPolicy):
        paths = "; ".join("-".join(str(rank + 1) for rank in path) for path in point.tree.paths)
        return [("paths (choices from the root)", paths, "-")]
    defaults = type(point.tree)()

    def said(value: Any) -> str:
        return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    return [
        (name, said(value), said(getattr(defaults, name)))
        for name, value in point.tree.model_dump().items()
        if name != "policy"
    ]


@dataclass(frozen=True)
class Comparison:
    """The arms of the evaluation."""

    plain: ComparedArm | None
    defaults: list[ComparedArm]
    tuned: ComparedArm | None
    own: ComparedArm | None
    """The profile as it decodes: what was tuned, or plain decoding where no draft beats that."""

    @property
    def best_default(self) -> ComparedArm | None:
        """The fastest of the published ones."""
        return max(self.defaults, key=lambda arm: arm.speedup, default=None)


def comparison(profile: DecodingProfile) -> Comparison:
    """Of the profile's evidence."""
    arms = {arm.name: arm for arm in profile.evidence.compared}
    return Comparison(
        plain=arms.get(AR),
        defaults=[arm for name, arm in arms.items() if name not in (AR, TUNED)],
        tuned=arms.get(TUNED),
        own=arms.get(AR if profile.point.tree is None else TUNED),
    )
