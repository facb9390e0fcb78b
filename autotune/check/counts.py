"""The exact gate: compares the counts of two decodings of the same prompts. Counts have no noise.

The target forwards, draft forwards and nodes of a prompt depend only on models, tree and prompt, so every difference is
a change of the program. Differences are priced in plain decoding steps, by the prices that the profile took from its
cost table.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def counts_gate(
    current: Sequence[Decoded],
    baseline: Sequence[Decoded],
    prices: Sequence[RoundPrice | None],
    *,
    name: str,
    workload: str,
    source: str,
    tolerance: float | None,
    advisory_reason: str | None = None,
    different_answer_reason: str | None = None,
) -> Gate:
    """The gate on counts compared with those of ``source``, prompt by prompt. Counts of different answers are of other
    work, and are not compared.

    A predicted slowdown above ``tolerance`` is a regression; without a tolerance, any other count is one. With an
    ``advisory_reason`` the gate can only warn, and with a ``different_answer_reason`` different answers are acceptable.

    Args:
        prices: of the operating point that decodes each prompt.
    """
    changes: list[tuple[float, str]] = []
    different: list[str] = []
    num_worse = 0
    total = total_before = 0.0
    for run, before, price in zip(current, baseline, prices, strict=True):
        if run.tokens_sha256 != before.tokens_sha256:
            different.append(f"{run.prompt}: different answer")
            continue
        steps, steps_before = (cost_in_steps(one, price or TARGET_FORWARDS_ONLY) for one in (run, before))
        total += steps
        total_before += steps_before
        if run.counts != before.counts:
            shorter = run.accepted_tokens * before.target_forwards < before.accepted_tokens * run.target_forwards
            num_worse += steps > steps_before or shorter
            changes.append((steps_before - steps, _change(run, before, steps, steps_before)))
    slowdown = total / total_before - 1 if total_before else 0.0
    num_equal = len(current) - len(changes) - len(different)
    summary = [f"{num_equal} of {len(current)} prompts have the same counts as {source}"]
    if changes:
        others = len(changes) - num_worse
        predicted = f"predicted {100 * slowdown:+.1f} % time"
        summary.append(f"{num_worse} have worse counts, {others} other counts: {predicted}")
    if different:
        reason = different_answer_reason or "with the same target"
        summary.append(f"{len(different)} have a different answer ({reason})")
    verdict: GateVerdict = "warned" if num_worse or different else "passed"
    is_slower = bool(changes) if tolerance is None else slowdown > tolerance
    if is_slower or (different and different_answer_reason is None):
        verdict = "failed"
    if verdict != "passed" and advisory_reason is not None:
        verdict = "warned"
        summary.append(f"advisory only: {advisory_reason}")
    details = [*different, *(text for _, text in sorted(changes, key=lambda change: change[0]))]
    return Gate(name=name, workload=workload, verdict=verdict, summary="; ".join(summary), details=details)


def _change(run: Decoded, before: Decoded, steps: float, steps_before: float) -> str:
    """The counts of a prompt that have changed, the predicted change of its time."""
    pairs = [(name.replace("_", " "), getattr(before, name), getattr(run, name)) for name in COMPARED]
    changes = [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
    change = 100 * (steps / steps_before - 1) if steps_before else 0.0
    return f"{run.prompt}: {', '.join(changes) or 'accepted lengths in another order'}; predicted {change:+.1f} % time"
