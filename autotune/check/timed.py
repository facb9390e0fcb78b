"""The timed gate: pairs until a look decides, the cap is reached, or the next look would not fit the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.check.pairs import Pair, PairRunner
from autotune.check.power import Shares, replayed, simulate
from autotune.check.result import TIME, Gate, GateVerdict, Timing
from autotune.check.sequential import (
    PAIRS_PER_LAUNCH,
    Design,
    Floats,
    Look,
    Verdict,
    estimate,
    hodges_lehmann,
    look,
)
from autotune.errors import UserError

AA_CHECKS = 2000  # simulated of the noise that an A/A run has recorded
GOOD_FALSE_ALARMS, GOOD_DETECTION = 0.01, 0.95  # what a machine must keep to be worth checking on


@dataclass(frozen=True)
class Outcome:
    """How the pairs ended."""

    look: Look
    out_of_time: bool
    """Undecided, because the next look would not have fitted the budget."""


def run_looks(
    runner: PairRunner,
    design: Design,
    *,
    budget_s: float,
    stops_early: bool = True,
    report: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Decode pairs and look.

    Raises:
        UserError: the first look does not fit the budget, by what the first pairs took.
    """
    deadline = runner.clock() + budget_s
    found: Look | None = None
    for number, num_pairs in enumerate(design.looks):
        if len(runner.pairs) < num_pairs:
            if not runner.pair_s:  # something to estimate by
                runner.run_to(min(num_pairs, len(runner.pairs) + PAIRS_PER_LAUNCH), report)
            needed_s = runner.seconds_to(num_pairs)
            if runner.clock() + needed_s > deadline:
                if found is not None:
                    return Outcome(found, out_of_time=True)
                total_s = budget_s + runner.clock() + needed_s - deadline
                raise UserError(
                    f"--budget {budget_s:.0f}s: the first look, at {num_pairs} pairs, takes about {total_s:.0f} s here; "
                    f"give --budget {math.ceil(1.2 * total_s / 60)}m (the {len(runner.pairs)} pairs so far are kept)"
                )
            runner.run_to(num_pairs, report)
        found = look(log_ratios(runner.pairs[:num_pairs]), launches(runner.pairs[:num_pairs]), number, design)
        if stops_early and found.verdict is not Verdict.GO_ON:
            break
    assert found is not None
    return Outcome(found, out_of_time=False)


def log_ratios(pairs: Sequence[Pair]) -> Floats:
    return np.array([pair.log_ratio for pair in pairs])


def launches(pairs: Sequence[Pair]) -> np.ndarray:
    return np.array([pair.launch for pair in pairs])


def timing_of(runner: PairRunner, outcome: Outcome, design: Design) -> Timing:
    """What the pairs say, decision and estimates."""
    pairs = runner.pairs[: outcome.look.num_pairs]
    found = estimate(log_ratios(pairs), launches(pairs))
    plain = [pair for pair in pairs if pair.plain_log_ratio is not None]
    base, head = runner.sides
    return Timing(
        base=base.what,
        head=head.what,
        seed=runner.seed,
        limit=design.limit,
        tolerance=design.tolerance,
        looks=design.looks,
        slowdown=found.slowdown,
        ci95=found.ci95,
        p_within_tolerance=float(outcome.look.p_within_tolerance),
        p_beyond_limit=float(outcome.look.p_beyond_limit),
        plain_slowdown=math.expm1(hodges_lehmann(np.array([pair.plain_log_ratio for pair in plain])))
        if plain
        else None,
        speedup=sum(pair.plain_head_ms or 0.0 for pair in plain) / sum(pair.head_ms for pair in plain)
        if plain
        else None,
        pairs=pairs,
    )


def judge_time(timing: Timing, outcome: Outcome, workload: str) -> Gate:
    """The verdict on base against head."""
    verdict: GateVerdict = "inconclusive"
    seen = f"{describe(timing)} after {len(timing.pairs)} pairs"
    if outcome.look.verdict is Verdict.FAIL:
        verdict, why = (
            "failed",
            f"slower by more than {100 * timing.tolerance:g} % (p = {timing.p_within_tolerance:.2g})",
        )
    elif outcome.look.verdict is Verdict.PASS:
        verdict, why = "passed", f"not slower by {100 * timing.limit:g} % (p = {timing.p_beyond_limit:.2g})"
    elif outcome.out_of_time:
        why = "the budget ended before the next look; raise --budget, and the pairs so far count"
    else:
        why = "undecided at the last look; the machine is too noisy for this limit, or the slowdown lies between tolerance and limit"
    details = []
    if timing.plain_slowdown is not None:
        details.append(
            f"plain decoding, as a control: {100 * timing.plain_slowdown:+.1f} %; speedup of head: {timing.speedup:.2f}x"
        )
    return Gate(name=TIME, workload=workload, verdict=verdict, summary=f"{seen}: {why}", details=details)


def judge_machine(timing: Timing, outcome: Outcome, workload: str, design: Design) -> Gate:
    """What an A/A run says of this machine: equal sides must not differ, and their noise, replayed, tells what a check
    here finds.
    """
    pairs = timing.pairs
    x, of = log_ratios(pairs), launches(pairs)
    noise = replayed([x[of == number] for number in np.unique(of)])
    unchanged, slower = (simulate(noise, change, design, num_checks=AA_CHECKS) for change in (0.0, design.limit))
    is_good = (
        outcome.look.verdict is not Verdict.FAIL
        and unchanged.failed <= GOOD_FALSE_ALARMS
        and slower.failed >= GOOD_DETECTION
    )
    low, high = np.quantile(x, [0.25, 0.75])
    return Gate(
        name=TIME,
        workload=workload,
        verdict="passed" if is_good else "inconclusive",
        summary=f"A/A, {describe(timing)} after {len(pairs)} pairs: {'' if is_good else 'not '}fit to find a slowdown of {100 * design.limit:g} %",
        details=[
            f"pairs of the same program differ by {100 * (high - low):.1f} % (interquartile range)",
            _describe_shares(0.0, unchanged),
            _describe_shares(design.limit, slower),
        ],
    )


def describe(timing: Timing) -> str:
    low, high = timing.ci95
    return f"head {100 * timing.slowdown:+.1f} % time ({100 * low:+.1f} to {100 * high:+.1f} %)"


def _describe_shares(slowdown: float, shares: Shares) -> str:
    return (
        f"replayed, a change of {100 * slowdown:g} % fails {100 * shares.failed:.1f} % of checks, passes {100 * shares.passed:.1f} %, "
        f"after {shares.mean_pairs:.0f} pairs"
    )
