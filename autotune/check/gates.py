"""Gates on answers and counts of two decodings of the same prompts, which have no noise. Loads no torch.

The target forwards, draft forwards and nodes of a prompt depend only on models, tree and prompt, so every difference is
a change of the program. Differences are priced in plain decoding steps, by the prices that the profile took from its
cost table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autotune.check.result import LOSSLESS, SPEEDUP, Gate, GateVerdict
from autotune.documents.decoded import Decoded
from autotune.evaluation.summary import Summary
from autotune.trees.fallback import RoundPrice

# For profiles without prices: target forwards dominate the time of decoding.
TARGET_FORWARDS_ONLY = RoundPrice(round_steps=1.0, level_steps=0.0, node_steps=0.0)
COMPARED = ("target_forwards", "draft_forwards", "verified_nodes", "plain_steps", "accepted_tokens")


def lossless_gate(workload: str, summary: Summary, differences: Mapping[str, str], rounding: str) -> Gate:
    """Fails if an answer of a lossless profile differs from plain decoding's, and not by rounding.

    Args:
        differences: where answers differ, by prompt.
        rounding: why rounding explains all of them; empty if it does not.
    """
    verdict: GateVerdict = "passed"
    text = f"{summary.identical_outputs}/{summary.num_prompts} outputs equal plain decoding"
    if differences and rounding:
        verdict, text = "warned", f"{len(differences)} outputs differ from plain decoding: {rounding}"
    elif differences:
        verdict, text = "failed", "the output differs from plain decoding"
    details = [f"{prompt}: output differs at {where}" for prompt, where in differences.items()]
    return Gate(name=LOSSLESS, workload=workload, verdict=verdict, summary=text, details=details)


def speedup_gate(workload: str, summary: Summary, min_speedup: float) -> Gate:
    """Fails only if the whole confidence interval is below the minimum, so that noise alone does not fail."""
    low, high = summary.ci95
    verdict: GateVerdict = "failed" if high < min_speedup else "passed"
    text = f"the speedup {'is below' if verdict == 'failed' else 'may be'} {min_speedup:g}: {summary.speedup:.2f}x"
    return Gate(name=SPEEDUP, workload=workload, verdict=verdict, summary=f"{text} ({low:.2f}-{high:.2f})")


def counts_gate(
    current: Sequence[Decoded],
    baseline: Sequence[Decoded],
    price: RoundPrice | None,
    *,
    name: str,
    workload: str,
    source: str,
    tolerance: float | None,
    tolerated_changes: float = 0.0,
    advisory_reason: str = "",
    rounding: str = "",
) -> Gate:
    """The gate on counts compared with those of ``source``, prompt by prompt. Counts of different answers are of other
    work, and are not compared.

    A predicted slowdown above ``tolerance`` is a regression; without a tolerance, any other count is one.

    Args:
        price: of the profile's rounds; None: target forwards alone cost time.
        tolerated_changes: without a tolerance, the share of prompts that may have other counts.
        advisory_reason: why the gate can only warn.
        rounding: why different answers are acceptable.
    """
    changes: list[tuple[float, str]] = []
    different: list[str] = []
    num_worse = 0
    total = total_before = 0.0
    for run, before in zip(current, baseline, strict=True):
        if run.tokens_sha256 != before.tokens_sha256:
            different.append(f"{run.prompt}: different answer")
            continue
        steps, steps_before = (cost_in_steps(counts, price or TARGET_FORWARDS_ONLY) for counts in (run, before))
        total += steps
        total_before += steps_before
        if work_of(run) != work_of(before):
            num_worse += steps > steps_before or run.accepted_tokens < before.accepted_tokens
            changes.append((steps_before - steps, _change(run, before, steps, steps_before)))
    slowdown = total / total_before - 1 if total_before else 0.0
    num_equal = len(current) - len(changes) - len(different)
    summary = [f"{num_equal} of {len(current)} prompts have the same counts as {source}"]
    if changes:
        others = f"{num_worse} have worse counts, {len(changes) - num_worse} other counts"
        summary.append(f"{others}: predicted {100 * slowdown:+.1f} % time")
    if different:
        summary.append(f"{len(different)} have a different answer ({rounding or 'with the same target'})")
    num_tolerated = tolerated_changes * (len(current) - len(different))
    is_slower = len(changes) > num_tolerated if tolerance is None else slowdown > tolerance
    verdict: GateVerdict = "passed"
    if is_slower or (different and not rounding):
        verdict = "failed"
    elif num_worse or different:
        verdict = "warned"
    if verdict != "passed" and advisory_reason:
        verdict = "warned"
        summary.append(f"advisory only: {advisory_reason}")
    details = [*different, *(text for _, text in sorted(changes, key=lambda change: change[0]))]
    return Gate(name=name, workload=workload, verdict=verdict, summary="; ".join(summary), details=details)


def work_of(run: Decoded) -> list[int]:
    """The work of decoding an answer."""
    return [getattr(run, name) for name in COMPARED]


def cost_in_steps(counts: Decoded, price: RoundPrice) -> float:
    """The cost of the counts in plain decoding steps."""
    rounds = counts.target_forwards - counts.plain_steps
    in_rounds = price.round_steps * rounds + price.level_steps * counts.draft_forwards
    return counts.plain_steps + in_rounds + price.node_steps * counts.verified_nodes


def _change(run: Decoded, before: Decoded, steps: float, steps_before: float) -> str:
    """The counts of a prompt that have changed, and the predicted change of its time."""
    pairs = [(name.replace("_", " "), getattr(before, name), getattr(run, name)) for name in COMPARED]
    changes = [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
    change = 100 * (steps / steps_before - 1) if steps_before else 0.0
    return f"{run.prompt}: {', '.join(changes)}; predicted {change:+.1f} % time"


def if_repeatable(gate: Gate, runs: Sequence[Decoded], decode_again: Callable[[], Sequence[Decoded]]) -> Gate:
    """A gate on the counts of runs, or a skipped one if it has failed and the counts differ when decoded again."""
    if gate.verdict != "failed":
        return gate
    changed = [run.prompt for run, again in zip(runs, decode_again(), strict=True) if work_of(run) != work_of(again)]
    if not changed:
        return gate
    shown = f"{len(changed)} of {len(runs)} prompts have other counts when decoded again ({', '.join(changed[:3])})"
    return skipped(gate.name, gate.workload, f"counts are not reproducible: {shown}")


def skipped(name: str, workload: str, reason: str) -> Gate:
    return Gate(name=name, workload=workload, verdict="skipped", summary=reason)
