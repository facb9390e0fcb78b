"""The exact gate: compares the counts of two decodings of the same prompts. Counts have no noise.

The target forwards, draft forwards and nodes of a prompt depend only on models, tree and prompt, so every difference is
a change of the program. Differences are priced in plain decoding steps, by the prices that the profile took from its
cost table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.check.result import Gate, GateVerdict
from autotune.documents.decoded import Decoded
from autotune.trees.fallback import RoundPrice

# For profiles without prices: target forwards dominate the time of decoding.
TARGET_FORWARDS_ONLY = RoundPrice(round_steps=1.0, level_steps=0.0, node_steps=0.0)
COMPARED = ("target_forwards", "draft_forwards", "verified_nodes", "plain_steps", "accepted_tokens")


def cost_in_steps(counts: Decoded, price: RoundPrice) -> float:
    """The cost of the counts in plain decoding steps."""
    rounds = counts.target_forwards - counts.plain_steps
    in_rounds = price.round_steps * rounds + price.level_steps * counts.draft_forwards
    return counts.plain_steps + in_rounds + price.node_steps * counts.verified_nodes


@dataclass(frozen=True)
class CountChange:
    """A prompt with the same answer and other counts."""

    baseline: Decoded
    current: Decoded
    baseline_steps: float
    current_steps: float

    @property
    def is_worse(self) -> bool:
        """Whether the predicted time rose or the mean accepted length fell."""
        baseline, current = self.baseline, self.current
        return self.current_steps > self.baseline_steps or (
            current.accepted_tokens * baseline.target_forwards < baseline.accepted_tokens * current.target_forwards
        )

    def __str__(self) -> str:
        parts = []
        for name in COMPARED:
            before, after = getattr(self.baseline, name), getattr(self.current, name)
            if before != after:
                parts.append(f"{name.replace('_', ' ')} {before} -> {after}")
        change = 100 * (self.current_steps / self.baseline_steps - 1) if self.baseline_steps else 0.0
        changes = ", ".join(parts) or "accepted lengths in another order"
        return f"{self.current.prompt}: {changes}; predicted {change:+.1f} % time"


@dataclass(frozen=True)
class CountComparison:
    num_prompts: int
    changed: list[CountChange]
    different_answers: list[str]
    """Prompts with other tokens: their counts are of other work and are not compared."""
    slowdown: float
    """Predicted over all prompts with the same answer; 0.05 is 5 %."""


def compare_counts(
    current: Sequence[Decoded], baseline: Sequence[Decoded], prices: Sequence[RoundPrice | None]
) -> CountComparison:
    """Compare prompt by prompt, each with the prices of the operating point that decodes it."""
    changed, different_answers = [], []
    total_current = total_baseline = 0.0
    for new, old, price in zip(current, baseline, prices, strict=True):
        if new.tokens_sha256 != old.tokens_sha256:
            different_answers.append(new.prompt)
            continue
        price = price or TARGET_FORWARDS_ONLY
        new_steps, old_steps = cost_in_steps(new, price), cost_in_steps(old, price)
        total_current += new_steps
        total_baseline += old_steps
        if new.counts != old.counts:
            changed.append(CountChange(old, new, old_steps, new_steps))
    slowdown = total_current / total_baseline - 1 if total_baseline else 0.0
    return CountComparison(len(current), changed, different_answers, slowdown)


def counts_gate(
    comparison: CountComparison,
    name: str,
    workload: str,
    *,
    source: str,
    tolerance: float,
    advisory_reason: str | None = None,
    different_answer_reason: str | None = None,
) -> Gate:
    """The gate on a comparison of counts with those of ``source``.

    A predicted slowdown above ``tolerance`` is a regression. With an ``advisory_reason`` the gate can only warn, and
    with a ``different_answer_reason`` different answers are acceptable.
    """
    changed, different = comparison.changed, comparison.different_answers
    num_worse = sum(change.is_worse for change in changed)
    num_equal = comparison.num_prompts - len(changed) - len(different)
    summary = [f"{num_equal} of {comparison.num_prompts} prompts have the same counts as {source}"]
    if changed:
        summary.append(
            f"{num_worse} have worse counts, {len(changed) - num_worse} other counts: "
            f"predicted {100 * comparison.slowdown:+.1f} % time"
        )
    if different:
        summary.append(
            f"{len(different)} have a different answer ({different_answer_reason or 'with the same target'})"
        )
    verdict: GateVerdict = "passed"
    if num_worse or different:
        verdict = "warned"
    if comparison.slowdown > tolerance or (different and different_answer_reason is None):
        verdict = "failed"
    if verdict != "passed" and advisory_reason is not None:
        verdict = "warned"
        summary.append(f"advisory only: {advisory_reason}")
    by_loss = sorted(changed, key=lambda change: change.baseline_steps - change.current_steps)
    details = [*(f"{prompt}: different answer" for prompt in different), *map(str, by_loss)]
    return Gate(name=name, workload=workload, verdict=verdict, summary="; ".join(summary), details=details)
