"""Estimates the error rates and the power of ``autotune check --against`` under simulated and recorded noise.

Prints for every scenario how often the check fails at slowdowns from 0 to 10 % and how many pairs it takes, then the
false alarms and the power of weaker designs: pairs in a fixed order, an analysis after every launch without sharing the
risk, and pairs treated as independent of their launch. Takes about 10 minutes.

    python benchmarks/check_power.py [--checks 2000]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from autotune.evaluation.not_slower import PAIRS_PER_LAUNCH, Design, Floats, Verdict, interim_analysis, launches_of
from autotune.files import read_json

RECORDED = Path(__file__).with_name("check_noise.json")
DESIGN = Design()
BATCH = 500  # checks simulated at once, as many as fit the cache
CURVE = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.10)


Noise = Callable[[np.random.Generator, int, int], Floats]
"""Log-ratios of an unchanged program: (generator, checks, pairs) to [checks, pairs]."""


@dataclass(frozen=True)
class Shares:
    failed: float
    passed: float
    mean_pairs: float


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
    """Noise drawn from recorded launches of equal sides, with a random sign, because the sides are interchangeable."""
    complete = np.array([launch for launch in launches if len(launch) == PAIRS_PER_LAUNCH])
    signs = np.array([-1.0, 1.0] if random_sign else [1.0])

    def noise(rng: np.random.Generator, num_checks: int, num_pairs: int) -> Floats:
        shape = (num_checks, -(-num_pairs // PAIRS_PER_LAUNCH))
        drawn = complete[rng.integers(len(complete), size=shape)] * rng.choice(signs, size=(*shape, 1))
        return np.asarray(drawn.reshape(num_checks, -1)[:, :num_pairs])

    return noise


def decide(x: Floats, design: Design) -> tuple[NDArray[np.object_], NDArray[np.int64]]:
    """Verdicts [checks] and numbers of pairs used [checks] of complete checks x[checks, pairs] with complete
    launches.
    """
    verdicts = np.full(len(x), Verdict.CONTINUE, dtype=object)
    used = np.full(len(x), design.max_pairs)
    for number, num_pairs in enumerate(design.analyses):
        open_checks = np.flatnonzero(verdicts == Verdict.CONTINUE)
        if not len(open_checks):
            break
        is_by_pair = isinstance(design, WeakerDesign) and design.pairs_per_launch == 1
        launches = np.arange(num_pairs) if is_by_pair else launches_of(num_pairs)
        analysis = interim_analysis(x[open_checks, :num_pairs], launches, number, design)
        verdicts[open_checks] = analysis.verdicts
        used[open_checks] = num_pairs
    return verdicts, used


@dataclass(frozen=True)
class Scenario:
    """Disturbances of run times, as shares of the time. They multiply."""

    jitter: float = 0.0
    """Standard deviation of single runs."""
    tails: float = 0.0
    """Scale of Student's t with 3 degrees of freedom: jitter with outliers."""
    speed: float = 0.0
    """Standard deviation of the machine's speed, of which a run keeps ``memory`` from the run before (AR(1))."""
    memory: float = 0.9
    drift: float = 0.0
    """Largest relative change of the machine's speed over a check, in either direction."""
    periodic: float = 0.0
    """Slowdown by a periodic load with a period of 2 to 20 runs and a duty cycle of 30 %."""
    spikes: float = 0.0
    """Share of runs that take twice as long."""
    second: float = 0.0
    """Slowdown of the second run of a pair."""
    launch: float = 0.0
    """Standard deviation between processes."""

    def log_times(self, rng: np.random.Generator, num_checks: int, num_runs: int) -> Floats:
        """Noise in the logarithm of each run's time, [checks, runs]."""
        shape, run = (num_checks, num_runs), np.arange(num_runs)
        phase, period = rng.random((num_checks, 1)), rng.uniform(2, 20, (num_checks, 1))
        steps = rng.normal(0.0, self.speed * math.sqrt(1 - self.memory**2), shape)
        steps[:, 0] = rng.normal(0.0, self.speed, num_checks)
        noise = rng.normal(0.0, self.jitter, shape) + self.tails * rng.standard_t(3, shape)
        noise += lfilter([1.0], [1.0, -self.memory], steps, axis=-1)
        noise += math.log1p(self.drift) * rng.uniform(-1, 1, (num_checks, 1)) * run / num_runs
        noise += math.log1p(self.periodic) * ((run / period + phase) % 1 < 0.3)
        noise += math.log(2) * (rng.random(shape) < self.spikes)
        noise += math.log1p(self.second) * (run % 2)
        return np.asarray(noise)

    def noise(self, *, fixed_order: bool = False) -> Noise:
        """Log-ratios of an unchanged program; in a fixed order the base goes first."""

        def draw(rng: np.random.Generator, num_checks: int, num_pairs: int) -> Floats:
            runs = self.log_times(rng, num_checks, 2 * num_pairs)
            later_over_earlier = runs[:, 1::2] - runs[:, 0::2]
            head_first = (
                np.zeros((num_checks, num_pairs), bool) if fixed_order else rng.random((num_checks, num_pairs)) < 0.5
            )
            processes = rng.normal(0.0, self.launch, (2, num_checks, num_pairs // PAIRS_PER_LAUNCH))
            of_launch = np.repeat(processes[1] - processes[0], PAIRS_PER_LAUNCH, axis=-1)
            return np.where(head_first, -later_over_earlier, later_over_earlier) + of_launch

        return draw


# The design keeps its error rates in the first three. In the last, processes differ as much as on one observed machine.
SCENARIOS = {
    "quiet": Scenario(jitter=0.005, launch=0.003),
    "shared": Scenario(tails=0.02, speed=0.05, memory=0.95, drift=0.1, spikes=0.01, second=0.01, launch=0.01),
    "hostile": Scenario(tails=0.02, speed=0.08, drift=0.3, periodic=0.1, spikes=0.05, second=0.02, launch=0.015),
    "unlike processes": Scenario(jitter=0.02, launch=0.03),
}


def recorded(path: Path = RECORDED) -> dict[str, list[list[Any]]]:
    """Launches of real A/A runs by name; each pair is (first time, second time, whether the head was first)."""
    found: dict[str, list[list[Any]]] = read_json(path)
    return found


def noises(*, fixed_order: bool = False) -> dict[str, Noise]:
    """Noise of all scenarios and recordings by name. In a fixed order the base goes first."""
    found = {name: scenario.noise(fixed_order=fixed_order) for name, scenario in SCENARIOS.items()}
    for name, launches in recorded().items():
        later = [np.array([math.log(second / first) for first, second, _ in launch]) for launch in launches]
        if fixed_order:  # base and head cannot be swapped
            found[f"recorded, {name}"] = replayed(later, random_sign=False)
        else:
            signs = [np.array([-1.0 if head_first else 1.0 for *_, head_first in launch]) for launch in launches]
            found[f"recorded, {name}"] = replayed([x * sign for x, sign in zip(later, signs, strict=True)])
    return found


@dataclass(frozen=True)
class WeakerDesign(Design):
    """A design without one of its parts."""

    pairs_per_launch: int = PAIRS_PER_LAUNCH
    """1 treats pairs as independent."""
    spends: bool = True
    """False tests at each analysis as if it were the only one."""

    def share(self, number: int) -> float:
        return super().share(number) if self.spends else 1.0


BY_PAIR = WeakerDesign(analyses=(20, 40, 80, 160, 240), pairs_per_launch=1)
EVERY_LAUNCH = WeakerDesign(analyses=tuple(range(DESIGN.analyses[0], 241, PAIRS_PER_LAUNCH)), spends=False)


def variants() -> dict[str, tuple[Design, Callable[[str], Noise]]]:
    """The design, and designs without one of its parts, by name."""
    drawn, fixed = noises(), noises(fixed_order=True)
    return {
        "the design": (DESIGN, drawn.__getitem__),
        "base always first": (DESIGN, fixed.__getitem__),
        "analysis after every launch, risk not shared": (EVERY_LAUNCH, drawn.__getitem__),
        "pairs treated as independent": (BY_PAIR, drawn.__getitem__),
    }


def spread(noise: Noise) -> float:
    """Interquartile range of log-ratios."""
    low, high = np.quantile(noise(np.random.default_rng(0), 100, DESIGN.max_pairs), [0.25, 0.75])
    return float(high - low)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


@click.command()
@click.option("--checks", default=2000, show_default=True, help="Simulated for each figure.")
@click.option("--seed", default=0, show_default=True)
def main(checks: int, seed: int) -> None:
    def shares(noise: Noise, slowdown: float, design: Design = DESIGN) -> Shares:
        return simulate(noise, slowdown, design, num_checks=checks, seed=seed)

    names = list(noises())
    print(
        row(
            [
                "noise",
                "pairs differ by (IQR)",
                *(f"{100 * slowdown:g} %" for slowdown in CURVE),
                "pairs at 0 %",
                "at 5 %",
            ]
        )
    )
    print(row(["---"] * (4 + len(CURVE))))
    for name in names:
        found = {slowdown: shares(noises()[name], slowdown) for slowdown in CURVE}
        failed = [percent(of.failed) for of in found.values()]
        pairs = [f"{found[slowdown].mean_pairs:.0f}" for slowdown in (0.0, 0.05)]
        print(row([name, percent(spread(noises()[name])), *failed, *pairs]), flush=True)
    print()
    print(row(["false alarms at 0 % / found at 5 %", *names]))
    print(row(["---"] * (1 + len(names))))
    for variant, (design, noise) in variants().items():
        cells = [
            " / ".join(percent(shares(noise(name), change, design).failed) for change in (0.0, 0.05)) for name in names
        ]
        print(row([variant, *cells]), flush=True)


if __name__ == "__main__":
    main()
