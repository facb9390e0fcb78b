"""The power of the timed gate, from simulated checks through the code that decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.check.sequential import PAIRS_PER_LAUNCH, Design, Floats, Verdict, decide

Noise = Callable[[np.random.Generator, int, int], Floats]
"""Log-ratios of an unchanged program: (generator, checks, pairs) to [checks, pairs]."""
BATCH = 500  # checks simulated at once, as many as fit the cache


@dataclass(frozen=True)
class Shares:
    """Shares of simulated checks by verdict, and the mean number of pairs."""

    failed: float
    passed: float
    mean_pairs: float

    @property
    def open(self) -> float:
        return 1.0 - self.failed - self.passed


def simulate(noise: Noise, slowdown: float, design: Design, *, num_checks: int, seed: int = 0) -> Shares:
    """Simulate checks of a program that is slower by ``slowdown``."""
    rng = np.random.default_rng(seed)
    failed = passed = num_pairs = 0
    for begin in range(0, num_checks, BATCH):
        x = noise(rng, min(BATCH, num_checks - begin), design.max_pairs) + np.log1p(slowdown)
        verdicts, used = decide(x, design)
        failed += int((verdicts == Verdict.FAIL).sum())
        passed += int((verdicts == Verdict.PASS).sum())
        num_pairs += int(used.sum())
    return Shares(failed / num_checks, passed / num_checks, num_pairs / num_checks)


def replayed(launches: Sequence[Floats], *, random_sign: bool = True) -> Noise:
    """Noise drawn from recorded launches of equal sides; their sign is random, because the sides are interchangeable."""
    complete = np.array([launch for launch in launches if len(launch) == PAIRS_PER_LAUNCH])
    signs = np.array([-1.0, 1.0] if random_sign else [1.0])

    def noise(rng: np.random.Generator, num_checks: int, num_pairs: int) -> Floats:
        shape = (num_checks, -(-num_pairs // PAIRS_PER_LAUNCH))
        drawn = complete[rng.integers(len(complete), size=shape)] * rng.choice(signs, size=(*shape, 1))
        return np.asarray(drawn.reshape(num_checks, -1)[:, :num_pairs])

    return noise
