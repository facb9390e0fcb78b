"""How often the timed gate would be right: simulated checks through the very code that decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.check.sequential import PAIRS_PER_LAUNCH, Design, Floats, Verdict, decide

Noise = Callable[[np.random.Generator, int, int], Floats]
"""Log-ratios of an unchanged program: (random numbers, checks, pairs) to [checks, pairs]."""
BATCH = 500  # checks at once: what fits a cache


@dataclass(frozen=True)
class Shares:
    """Of simulated checks, by how they ended, and the pairs that they took on average."""

    failed: float
    passed: float
    mean_pairs: float

    @property
    def open(self) -> float:
        return 1.0 - self.failed - self.passed


def simulate(noise: Noise, slowdown: float, design: Design, *, num_checks: int, seed: int = 0) -> Shares:
    """Checks of a program that is slower by ``slowdown``."""
    rng = np.random.default_rng(seed)
    failed = passed = num_pairs = 0
    for begin in range(0, num_checks, BATCH):
        x = noise(rng, min(BATCH, num_checks - begin), design.cap) + np.log1p(slowdown)
        verdicts, taken = decide(x, design)
        failed += int((verdicts == Verdict.FAIL).sum())
        passed += int((verdicts == Verdict.PASS).sum())
        num_pairs += int(taken.sum())
    return Shares(failed / num_checks, passed / num_checks, num_pairs / num_checks)


def replayed(launches: Sequence[Floats], *, either_sign: bool = True) -> Noise:
    """Recorded launches of equal sides in random order; of either sign, for the sides could have been named the other
    way round.
    """
    whole = np.array([launch for launch in launches if len(launch) == PAIRS_PER_LAUNCH])
    signs = np.array([-1.0, 1.0] if either_sign else [1.0])

    def noise(rng: np.random.Generator, num_checks: int, num_pairs: int) -> Floats:
        shape = (num_checks, -(-num_pairs // PAIRS_PER_LAUNCH))
        drawn = whole[rng.integers(len(whole), size=shape)] * rng.choice(signs, size=(*shape, 1))
        return np.asarray(drawn.reshape(num_checks, -1)[:, :num_pairs])

    return noise
