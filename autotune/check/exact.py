"""The exact gate: counts of decoding, which have no noise, against those of another time or another version.

What a prompt takes of target forwards, draft forwards and nodes is decided by models, tree and prompt alone, so that
any change is a change of the program. What it costs is priced in plain decoding steps by the profile's own prices,
which the cost table gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.check.launch import Decoded
from autotune.check.result import Gate, GateVerdict
from autotune.documents.decoding_profile import PromptEvidence
from autotune.trees.fallback import RoundPrice

# Where a profile has no prices: the target's forwards are what decoding mostly consists of.
FORWARDS_ALONE = RoundPrice(round_steps=1.0, level_steps=0.0, node_steps=0.0)


@dataclass(frozen=True)
class Counts:
    """What decoding one prompt took. None: whoever counted did not know of it yet."""

    prompt: str
    tokens_sha256: str
    target_forwards: int
    """Behind the prefill; every round has one, and so has every plain step."""
    draft_forwards: int
    accepted_tokens: int
    plain_steps: int | None = None
    verified_nodes: int | None = None
    accepted_lengths: tuple[int, ...] | None = None

    @classmethod
    def of_evidence(cls, evidence: PromptEvidence) -> Counts:
        return cls(
            evidence.name,
            evidence.tokens_sha256,
            evidence.rounds,
            evidence.draft_forwards,
            evidence.accepted_tokens,
            evidence.plain_steps,
            evidence.verified_nodes,
            None if evidence.accepted_lengths is None else tuple(evidence.accepted_lengths),
        )

    @classmethod
    def of_decoded(cls, prompt: str, decoded: Decoded) -> Counts:
        return cls(
            prompt,
            decoded.tokens_sha256,
            decoded.target_forwards,
            decoded.draft_forwards,
            sum(decoded.accepted_lengths),
            decoded.plain_steps,
            decoded.verified_nodes,
            tuple(decoded.accepted_lengths),
        )

    def agrees_with(self, other: Counts) -> bool:
        """In everything that both know."""
        mine, others = vars(self), vars(other)
        return all(mine[name] == others[name] for name in mine if None not in (mine[name], others[name]))


def plain_steps(counts: Counts, price: RoundPrice, *, like: Counts) -> float:
    """What the counts cost, in plain decoding steps; of nodes and plain steps only if ``like`` knows its own."""
    is_known = like.plain_steps is not None and counts.plain_steps is not None
    rest = (counts.plain_steps or 0) if is_known else 0
    nodes = 0 if None in (counts.verified_nodes, like.verified_nodes) else counts.verified_nodes or 0
    rounds = counts.target_forwards - rest
    return rest + (price.round_steps * rounds + price.level_steps * counts.draft_forwards + price.node_steps * nodes)


@dataclass(frozen=True)
class CountChange:
    """A prompt whose counts are not what they were, though its answer is."""

    then: Counts
    now: Counts
    then_steps: float
    now_steps: float

    @property
    def is_worse(self) -> bool:
        return self.now_steps > self.then_steps or self.now.accepted_tokens * self.then.target_forwards < (
            self.then.accepted_tokens * self.now.target_forwards
        )

    def __str__(self) -> str:
        parts = [
            f"{name.replace('_', ' ')} {getattr(self.then, name)} -> {getattr(self.now, name)}"
            for name in ("target_forwards", "draft_forwards", "verified_nodes", "plain_steps", "accepted_tokens")
            if None not in (getattr(self.then, name), getattr(self.now, name))
            and getattr(self.then, name) != getattr(self.now, name)
        ]
        change = 100 * (self.now_steps / self.then_steps - 1) if self.then_steps else 0.0
        return f"{self.now.prompt}: {', '.join(parts) or 'accepted lengths in another order'}; predicted {change:+.1f} % time"


@dataclass(frozen=True)
class Comparison:
    """Counts of now beside those of then, prompt by prompt."""

    num_prompts: int
    changed: list[CountChange]
    other_answers: list[str]
    """Prompts whose tokens differ: other work, whose counts say nothing."""
    slowdown: float
    """Predicted, over all prompts with the same answer; 0.05 is five per cent."""


def compare(now: Sequence[Counts], then: Sequence[Counts], prices: Sequence[RoundPrice | None]) -> Comparison:
    """Prompt by prompt, each priced as the point that decodes it."""
    changed, other_answers = [], []
    steps_now = steps_then = 0.0
    for new, old, price in zip(now, then, prices, strict=True):
        if new.tokens_sha256 != old.tokens_sha256:
            other_answers.append(new.prompt)
            continue
        cost_now, cost_then = (
            plain_steps(mine, price or FORWARDS_ALONE, like=other) for mine, other in ((new, old), (old, new))
        )
        steps_now += cost_now
        steps_then += cost_then
        if not new.agrees_with(old):
            changed.append(CountChange(old, new, cost_then, cost_now))
    slowdown = steps_now / steps_then - 1 if steps_then else 0.0
    return Comparison(len(now), changed, other_answers, slowdown)


def judge(
    found: Comparison,
    gate: str,
    workload: str,
    *,
    than: str,
    tolerance: float,
    advises_only: str | None = None,
    answers_may_differ: str | None = None,
) -> Gate:
    """The verdict on counts.

    Args:
        than: what they are compared with, for people.
        tolerance: the predicted slowdown from which on counts that got worse are a regression.
        advises_only: why they cannot fail here, or None where they can.
        answers_may_differ: why another answer is no mistake, or None where it is one.
    """
    worse = [change for change in found.changed if change.is_worse]
    summary = [
        f"{found.num_prompts - len(found.changed) - len(found.other_answers)} of {found.num_prompts} prompts count as {than}"
    ]
    if found.changed:
        summary.append(
            f"{len(worse)} count worse, {len(found.changed) - len(worse)} otherwise: predicted {100 * found.slowdown:+.1f} % time"
        )
    if found.other_answers:
        summary.append(
            f"{len(found.other_answers)} have another answer ({answers_may_differ or 'with the same target'})"
        )
    verdict: GateVerdict = "passed"
    if worse or found.other_answers:
        verdict = "warned"
    if found.slowdown > tolerance or (found.other_answers and answers_may_differ is None):
        verdict = "failed"
    if verdict == "failed" and advises_only is not None:
        verdict = "warned"
    if verdict != "passed" and advises_only is not None:
        summary.append(f"advice only, for {advises_only}")
    answers = [f"{name}: another answer" for name in found.other_answers]
    return Gate(
        name=gate,
        workload=workload,
        verdict=verdict,
        summary="; ".join(summary),
        details=[*answers, *map(str, sorted(found.changed, key=lambda one: one.then_steps - one.now_steps))],
    )
