"""The timed gate: pairs are decoded until an interim analysis decides, or the next one does not fit the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.check.pairs import PairRunner, TimedPair
from autotune.check.result import TIME, Gate, GateVerdict, Timing
from autotune.check.sequential import (
    PAIRS_PER_LAUNCH,
    Design,
    Floats,
    InterimAnalysis,
    Verdict,
    estimate,
    hodges_lehmann,
    interim_analysis,
)
from autotune.errors import UserError


class TooFewPairs(UserError):
    """The budget has no time for the first interim analysis."""


@dataclass(frozen=True)
class Outcome:
    """The last interim analysis, and why there was no further one."""

    analysis: InterimAnalysis
    out_of_time: bool
    """It is undecided, and the next analysis did not fit the budget."""


def run_pairs(
    runner: PairRunner, design: Design, *, budget_s: float, report: Callable[[int], None] = lambda done: None
) -> Outcome:
    """Decode pairs up to each interim analysis until one decides.

    Raises:
        TooFewPairs: the first analysis does not fit the budget.
    """
    deadline = runner.clock() + budget_s
    analysis: InterimAnalysis | None = None
    for number, num_pairs in enumerate(design.analyses):
        if len(runner.pairs) < num_pairs:
            if not runner.pair_s:  # the estimate needs some durations
                runner.run_to(min(num_pairs, len(runner.pairs) + PAIRS_PER_LAUNCH), report)
            needed_s = runner.seconds_to(num_pairs)
            if runner.clock() + needed_s > deadline:
                if analysis is not None:
                    return Outcome(analysis, out_of_time=True)
                total_s = budget_s + runner.clock() + needed_s - deadline
                raise TooFewPairs(
                    f"--budget {budget_s:.0f}s: the first analysis, at {num_pairs} pairs, takes about {total_s:.0f} s here; "
                    f"give --budget {math.ceil(1.2 * total_s / 60)}m (the {len(runner.pairs)} pairs so far are kept)"
                )
            runner.run_to(num_pairs, report)
        pairs = runner.pairs[:num_pairs]
        analysis = interim_analysis(log_ratios(pairs), launches(pairs), number, design)
        if analysis.verdict is not Verdict.CONTINUE:
            break
    assert analysis is not None
    return Outcome(analysis, out_of_time=False)


def log_ratios(pairs: Sequence[TimedPair]) -> Floats:
    return np.array([pair.log_ratio for pair in pairs])


def launches(pairs: Sequence[TimedPair]) -> np.ndarray:
    return np.array([pair.launch for pair in pairs])


def timing_of(runner: PairRunner, outcome: Outcome, design: Design) -> Timing:
    pairs = runner.pairs[: outcome.analysis.num_pairs]
    slowdown, ci95 = estimate(log_ratios(pairs), launches(pairs))
    with_plain = [pair for pair in pairs if pair.plain_log_ratio is not None]
    plain_slowdown = speedup = None
    if with_plain:
        plain_slowdown = math.expm1(hodges_lehmann(np.array([pair.plain_log_ratio for pair in with_plain])))
        speedup = sum(pair.plain_head_ms or 0.0 for pair in with_plain) / sum(pair.head_ms for pair in with_plain)
    return Timing(
        base=runner.base.label,
        head=runner.head.label,
        seed=runner.seed,
        limit=design.limit,
        tolerance=design.tolerance,
        looks=design.analyses,
        slowdown=slowdown,
        ci95=ci95,
        p_within_tolerance=float(outcome.analysis.p_within_tolerance),
        p_beyond_limit=float(outcome.analysis.p_beyond_limit),
        plain_slowdown=plain_slowdown,
        speedup=speedup,
        pairs=pairs,
    )


def time_gate(timing: Timing, outcome: Outcome, workload: str) -> Gate:
    verdict: GateVerdict = "inconclusive"
    if outcome.analysis.verdict is Verdict.FAIL:
        verdict = "failed"
        reason = f"slower by more than {100 * timing.tolerance:g} % (p = {timing.p_within_tolerance:.2g})"
    elif outcome.analysis.verdict is Verdict.PASS:
        verdict = "passed"
        reason = f"not slower by {100 * timing.limit:g} % (p = {timing.p_beyond_limit:.2g})"
    elif outcome.out_of_time:
        reason = "the budget ended before the next analysis; raise --budget, and the pairs so far count"
    else:
        reason = (
            "undecided at the last analysis; the machine is too noisy for this limit, or the slowdown is between "
            "tolerance and limit"
        )
    details = []
    if (plain := timing.plain_slowdown) is not None:
        details.append(f"plain decoding, as a control: {100 * plain:+.1f} %; speedup of head: {timing.speedup:.2f}x")
    summary = f"{_describe(timing)} after {len(timing.pairs)} pairs: {reason}"
    return Gate(name=TIME, workload=workload, verdict=verdict, summary=summary, details=details)


def _describe(timing: Timing) -> str:
    low, high = timing.ci95
    return f"head {100 * timing.slowdown:+.1f} % time ({100 * low:+.1f} to {100 * high:+.1f} %)"
