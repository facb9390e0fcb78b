"""Has the program become slower? A sequential test on pairs of times, decided at few looks fixed beforehand.

A pair's x = ln(t_head / t_base), of the same prompt, in an order drawn at random. The test is Wilcoxon's exact signed
ranks, against two nulls: "slower by the tolerance at most" must fall for a failure, "slower by the limit at least" for
a pass. What may be mistaken is spent over the looks, more at later ones, so that looking often costs nothing.

Pairs of one launch are not independent: two processes of one program may differ by several per cent for as long as
they live, which five pairs in a row see with the same sign. The signed ranks of the pairs are therefore summed by
launch, and the sums are what is tested (after Rosner, Glynn and Lee 2006, but exactly). Taken pair by pair, the same
test would call an unchanged program slower several times as often as it says (``benchmarks/check_power.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, wilcoxon

Floats = NDArray[np.float64]
PAIRS_PER_LAUNCH = 5


class Verdict(Enum):
    FAIL = "slower"
    PASS = "not slower"
    GO_ON = "open"


@dataclass(frozen=True)
class Design:
    """What is asked, how surely, and when."""

    tolerance: float = 0.01
    """A slowdown up to here is none."""
    limit: float = 0.05
    """A slowdown from here on must be found."""
    fail_risk: float = 0.01
    """That a slowdown of ``tolerance`` or less fails."""
    pass_risk: float = 0.05
    """That a slowdown of ``limit`` or more passes."""
    looks: tuple[int, ...] = (55, 80, 160, 240)
    """Numbers of pairs. Of fewer than 55, eleven launches, the smallest probability that signs can have, 1/2048, is more
    than the first look may spend on a failure, if two workloads share it: nothing could fail.
    """
    num_workloads: int = 1
    """Which share the risks."""
    by_launch: bool = True
    """Whether pairs of a launch stand together; False takes them for independent."""
    spends: bool = True
    """Whether looks share the risks; False tests at each as if it were the only one."""

    def share(self, number: int) -> float:
        """Of the risks, at a look, from 0."""
        looks = len(self.looks)
        spent = (number + 1) / (looks * (looks + 1) / 2) if self.spends else 1.0
        return spent / self.num_workloads

    @property
    def cap(self) -> int:
        return self.looks[-1]


@dataclass(frozen=True)
class Look:
    """What one look saw: how probable it was, or anything beyond it, under each null."""

    num_pairs: int
    p_within_tolerance: Floats
    p_beyond_limit: Floats
    verdicts: NDArray[np.object_]

    @property
    def verdict(self) -> Verdict:
        """Of a single check."""
        found: Verdict = self.verdicts.item()
        return found


def look(x: Floats, launches: Floats | NDArray[np.int64], number: int, design: Design) -> Look:
    """The look ``number`` at log-ratios [..., pairs], each of a launch [pairs]."""
    p_slower = p_value(x - math.log1p(design.tolerance), launches if design.by_launch else None)
    p_faster = p_value(math.log1p(design.limit) - x, launches if design.by_launch else None)
    share = design.share(number)
    verdict = np.full(np.shape(p_slower), Verdict.GO_ON, dtype=object)
    verdict[p_faster <= design.pass_risk * share] = Verdict.PASS
    verdict[p_slower <= design.fail_risk * share] = Verdict.FAIL
    return Look(x.shape[-1], p_slower, p_faster, verdict)


def p_value(x: Floats, launches: NDArray[Any] | None) -> Floats:
    """How probable such positive values, or more positive ones, are if every launch's might as well have had the other
    sign: [...].
    """
    if launches is not None:
        signed = np.sign(x) * rankdata(np.abs(x), axis=-1)
        # Whole numbers tie; the launch's own sum breaks the ties, and changes its sign with it.
        starts = np.flatnonzero(np.diff(launches, prepend=launches[0] - 1))
        x = np.add.reduceat(signed + 1e-3 * x, starts, axis=-1)
    return np.asarray(wilcoxon(x, alternative="greater", method="exact", axis=-1).pvalue)


def decide(x: Floats, design: Design) -> tuple[NDArray[np.object_], NDArray[np.int64]]:
    """Whole checks, [checks, pairs] of whole launches: the verdicts, open where the cap decided nothing, and the pairs
    that each took.
    """
    verdicts = np.full(len(x), Verdict.GO_ON, dtype=object)
    taken = np.full(len(x), design.cap)
    for number, num_pairs in enumerate(design.looks):
        waiting = np.flatnonzero(verdicts == Verdict.GO_ON)
        if not len(waiting):
            break
        verdicts[waiting] = look(x[waiting, :num_pairs], launches_of(num_pairs), number, design).verdicts
        taken[waiting] = num_pairs
    return verdicts, taken


def launches_of(num_pairs: int) -> NDArray[np.int64]:
    """The launch of each pair where none was cut short."""
    return np.arange(num_pairs) // PAIRS_PER_LAUNCH


@dataclass(frozen=True)
class Estimate:
    """By how much the head is slower; 0.05 is five per cent."""

    slowdown: float
    ci95: tuple[float, float]


def estimate(x: Floats, launches: NDArray[np.int64]) -> Estimate:
    """Hodges and Lehmann's estimate of the slowdown, and what its test cannot tell from it: all values whose null it
    keeps.
    """
    centre = hodges_lehmann(x)
    return Estimate(math.expm1(centre), (math.expm1(_edge(x, launches, -1)), math.expm1(_edge(x, launches, 1))))


def hodges_lehmann(x: Floats) -> float:
    """The median of the means of all pairs of values, each with itself included."""
    rows, columns = np.triu_indices(len(x))
    return float(np.median((x[rows] + x[columns]) / 2))


def _edge(x: Floats, launches: NDArray[np.int64], side: int) -> float:
    """Where the one-sided probability falls through 2.5 %, found by ever finer steps outwards from the estimate. Of too
    few launches to exclude anything it is the outermost value itself.
    """
    inside, outside = hodges_lehmann(x), side * float(np.max(side * x))
    for _ in range(4):
        steps = np.linspace(inside, outside, 17)
        is_kept = p_value(side * (steps[:, None] - x), launches) > 0.025
        last = int(np.flatnonzero(is_kept)[-1]) if is_kept.any() else 0
        inside, outside = float(steps[last]), float(steps[min(last + 1, 16)])
    return inside
