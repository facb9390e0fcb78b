"""A rule of a race: is the second of two arms, the head, slower than the first, the base? A group-sequential test,
analysed at a few numbers of pairs that are fixed beforehand.

Each pair gives x = ln(t_head / t_base) for one prompt, decoded within about a second, in random order. A disturbance of
the machine then affects either arm with the same probability, so without a change x is distributed symmetrically around
0, which is all that the test assumes. No pair is ever discarded. The test is the exact Wilcoxon
signed-rank test of two null hypotheses: a failure must reject "slower by at most the tolerance", a pass must reject
"slower by at least the limit". The error probabilities are spent over the interim analyses, more at later ones, so
repeated analyses do not inflate them.

Pairs of one launch are not independent: two processes of the same program can differ by several per cent for as long as
they live, and five consecutive pairs then have the same sign. Signed ranks are therefore summed by launch, and the sums
are tested (after Rosner, Glynn and Lee 2006, but exactly). Tested pair by pair, an unchanged program would be called
slower several times as often as stated (``benchmarks/check_power.py``).

The base may also be a ratio that one earlier launch has measured, prompt by prompt (``NotSlower.known``). All launches
then decode the same prompts in the order of that launch, so that it is one more launch of the same kind: its error has
the standard deviation of their means, and twice that is added to the tolerance and to the limit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, wilcoxon

from autotune.documents.decoded import Decoded
from autotune.errors import NotComparable
from autotune.evaluation.race import Judgement, Look
from autotune.evaluation.summary import spent_share
from autotune.workloads.prompt import WorkloadPrompt

Floats = NDArray[np.float64]
PAIRS_PER_LAUNCH = 5


class Verdict(Enum):
    FAIL = "slower"
    PASS = "not slower"
    CONTINUE = "open"


@dataclass(frozen=True)
class Design:
    """Hypotheses, error probabilities and interim analyses of the test."""

    tolerance: float = 0.01
    """Slowdown that is acceptable."""
    limit: float = 0.05
    """Slowdown that must be detected."""
    fail_risk: float = 0.01
    """Probability that a slowdown of at most ``tolerance`` fails."""
    pass_risk: float = 0.05
    """Probability that a slowdown of at least ``limit`` passes."""
    analyses: tuple[int, ...] = (55, 80, 160, 240)
    """Numbers of pairs. With fewer than 55 pairs (11 launches), the smallest possible p-value of the signs, 1/2048,
    exceeds what the first analysis may spend on a failure if two workloads share it: nothing could fail.
    """
    num_workloads: int = 1
    """They share the error probabilities."""

    def share(self, number: int) -> float:
        """Share of the error probabilities for the analysis ``number``, from 0."""
        return spent_share(number, len(self.analyses)) / self.num_workloads

    @property
    def max_pairs(self) -> int:
        return self.analyses[-1]


@dataclass(frozen=True)
class InterimAnalysis:
    """p-values under both null hypotheses, and verdicts, of one or many checks."""

    num_pairs: int
    p_within_tolerance: Floats
    p_beyond_limit: Floats
    verdicts: NDArray[np.object_]

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.verdicts.item())


def interim_analysis(x: Floats, launches: Floats | NDArray[np.int64], number: int, design: Design) -> InterimAnalysis:
    """Analysis ``number`` of log-ratios x[..., pairs] with the launch of each pair, launches[pairs]."""
    p_slower = p_value(x - math.log1p(design.tolerance), launches)
    p_faster = p_value(math.log1p(design.limit) - x, launches)
    share = design.share(number)
    verdicts = np.full(np.shape(p_slower), Verdict.CONTINUE, dtype=object)
    verdicts[p_faster <= design.pass_risk * share] = Verdict.PASS
    verdicts[p_slower <= design.fail_risk * share] = Verdict.FAIL
    return InterimAnalysis(x.shape[-1], p_slower, p_faster, verdicts)


def p_value(x: Floats, launches: NDArray[Any]) -> Floats:
    """One-sided p-values [...] of x[..., pairs] being positive, if each launch could have had either sign."""
    signed = np.sign(x) * rankdata(np.abs(x), axis=-1)
    # Sums of ranks are integers and may tie; adding the launch's own values breaks ties and keeps the symmetry.
    starts = np.flatnonzero(np.diff(launches, prepend=launches[0] - 1))
    sums = np.add.reduceat(signed + 1e-3 * x, starts, axis=-1)
    return np.asarray(wilcoxon(sums, alternative="greater", method="exact", axis=-1).pvalue)


@dataclass
class NotSlower:
    """Two arms decode pairs until an interim analysis decides, or the next one does not fit the time that is left."""

    design: Design
    left_s: float
    """Time until the deadline of the race, in seconds."""
    seed: int = 0
    """Seed of the order of the prompts."""
    must_agree: bool = True
    """Whether different answers make the arms incomparable."""
    known: Mapping[str, float] = field(default_factory=dict)
    """ln(t_head / t_base) that an earlier launch has measured, by the prompt's hash; without any, the arms are compared
    with each other.
    """
    margin: float = field(default=0.0, init=False)
    """Uncertainty of ``known`` at the last analysis, which is added to the tolerance and to the limit."""
    analysis: InterimAnalysis | None = field(default=None, init=False)
    """The last one; None before the first."""
    needed_s: float = field(default=0.0, init=False)
    """Time that the pairs before the next analysis take."""

    def blocks(self, prompts: Sequence[WorkloadPrompt]) -> list[Sequence[WorkloadPrompt]]:
        """Pairs of one launch each. All prompts take turns, in a new random order each time; with known ratios, each
        launch has the first prompts in their order.
        """
        num_pairs, pairs = self.design.max_pairs, list[WorkloadPrompt]()
        if self.known:
            return [prompts[:PAIRS_PER_LAUNCH]] * (num_pairs // PAIRS_PER_LAUNCH)
        for turn in range(math.ceil(num_pairs / len(prompts))):
            pairs += random.Random(f"{self.seed}/turn/{turn}").sample(list(prompts), len(prompts))
        return [pairs[begin : begin + PAIRS_PER_LAUNCH] for begin in range(0, num_pairs, PAIRS_PER_LAUNCH)]

    def judge(self, look: Look) -> Judgement:
        """Analyse the pairs, if it is time for that.

        Raises:
            NotComparable: the arms answer differently, and must not.
        """
        over = Judgement(look.remaining, [])
        if len(look.running) < 2:
            return over
        base, head = (look.runs[name] for name in look.running)
        for of_base, of_head in zip(base, head, strict=True):
            if self.must_agree and of_base.tokens_sha256 != of_head.tokens_sha256:
                raise NotComparable(
                    f"{of_base.prompt}: base and head answer differently ({of_base.new_tokens} and {of_head.new_tokens} "
                    "tokens), so their times are not of the same work; compare sides with the same target and precision"
                )
        analyses, num_pairs = self.design.analyses, look.num_done
        block_s, self.left_s = self.left_s - look.left_s, look.left_s
        if num_pairs in analyses:
            x, design = log_ratios(base, head, self.known), self.design
            if self.known:
                self.margin = 2 * float(np.std(x.reshape(-1, PAIRS_PER_LAUNCH).mean(1), ddof=1))
                design = replace(design, tolerance=design.tolerance + self.margin, limit=design.limit + self.margin)
            self.analysis = interim_analysis(x, launches_of(num_pairs), analyses.index(num_pairs), design)
            if self.analysis.verdict is not Verdict.CONTINUE or num_pairs == self.design.max_pairs:
                return over
        num_missing = min(number for number in analyses if number > num_pairs) - num_pairs
        self.needed_s = block_s * num_missing / PAIRS_PER_LAUNCH
        return over if self.needed_s > self.left_s else Judgement(look.remaining, look.running)


def log_ratios(base: Sequence[Decoded], head: Sequence[Decoded], known: Mapping[str, float]) -> Floats:
    """ln(t_head / t_base) of each pair, by time per token after the first, above the known ratio of its prompt."""
    times = [[run.token_ms for run in runs] for runs in (base, head)]
    return np.asarray(np.log(times[1]) - np.log(times[0]) - [known.get(run.prompt_sha256, 0.0) for run in base])


def launches_of(num_pairs: int) -> NDArray[np.int64]:
    return np.arange(num_pairs) // PAIRS_PER_LAUNCH


def estimate(x: Floats, launches: NDArray[np.int64]) -> tuple[float, tuple[float, float]]:
    """The Hodges-Lehmann estimate of the slowdown (0.05 is 5 %), and the interval of all values that the test keeps."""
    low, high = (math.expm1(_confidence_limit(x, launches, sign)) for sign in (-1, 1))
    return math.expm1(hodges_lehmann(x)), (low, high)


def hodges_lehmann(x: Floats) -> float:
    """Median of the means of all pairs of values, each value paired with itself too."""
    rows, columns = np.triu_indices(len(x))
    return float(np.median((x[rows] + x[columns]) / 2))


def _confidence_limit(x: Floats, launches: NDArray[np.int64], sign: int) -> float:
    """Where the one-sided p-value falls below 2.5 %, by a search on ever finer grids from the estimate to the outermost
    value. With too few launches to reject anything it is the outermost value.
    """
    inside, outside = hodges_lehmann(x), sign * float(np.max(sign * x))
    for _ in range(4):
        grid = np.linspace(inside, outside, 17)
        is_kept = p_value(sign * (grid[:, None] - x), launches) > 0.025
        last = int(np.flatnonzero(is_kept)[-1]) if is_kept.any() else 0
        inside, outside = float(grid[last]), float(grid[min(last + 1, 16)])
    return inside
