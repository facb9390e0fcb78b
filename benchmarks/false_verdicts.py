"""Estimates how often a race between arms of equal speed names a loser: the share of false verdicts over all looks.

Each race runs as in a search, with simulated arms. Beside the rules stands the one that engines had before: a 95 %
bootstrap interval of the fastest of three arms, after 18, 24, ... 60 prompts. Takes about 15 minutes.

    python benchmarks/false_verdicts.py [--races 2000] [--output benchmarks/results/false-verdicts.json]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np

from autotune.check.sequential import Design
from autotune.console import Console
from autotune.evaluation.race import Fastest, Judgement, Look, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import bootstrap_ratio
from autotune.search.thresholds import HELD_OUT_PROMPTS, MAX_PASSES, RISK, ROUNDS
from autotune.workloads.prompt import WorkloadPrompt
from benchmarks.check_power import SCENARIOS as DISTURBANCES
from benchmarks.check_power import simulate
from tests.evaluation.fake_arm import FakeArm, prompts_by_hand

DISTURBED = 1.5  # times the usual ratio of an arm to the others


@dataclass(frozen=True)
class Noise:
    """Standard deviations of log times: of runs, and of an arm on a prompt in every run."""

    run: float
    prompt: float = 0.0
    skew: float = 0.0
    """Of the exponential distribution by which the second arm is faster on some prompts, and slower on most."""
    spikes: float = 0.0
    """Share of runs that take twice as long."""
    process: float = 0.0
    """Of an arm in all runs of a race."""


NOISES = {
    "runs 3 %": Noise(0.03),
    "runs 8 %": Noise(0.08),
    "runs 8 %, 2 % of them take twice as long": Noise(0.08, spikes=0.02),
    "runs 5 %, prompts 15 %": Noise(0.05, prompt=0.15),
    "runs 5 %, prompts skewed by 30 %": Noise(0.05, skew=0.3),
    "runs 5 %, processes 0.5 %": Noise(0.05, process=0.005),
}


def arms_of(count: int, noise: Noise, rng: np.random.Generator, num_prompts: int) -> list[FakeArm]:
    """Arms of equal speed: their mean log times are the same."""

    def arm(number: int) -> FakeArm:
        of_prompts = rng.normal(0, noise.prompt, num_prompts) + rng.normal(0, noise.process)
        if number == 1:
            of_prompts += noise.skew * (1 - rng.exponential(size=num_prompts))

        def ms(prompt: WorkloadPrompt) -> float:
            spike = math.log(2) * (rng.random() < noise.spikes)
            return math.exp(of_prompts[int(prompt.name)] + rng.normal(0, noise.run) + spike)

        return FakeArm(f"{number}", ms)

    return [arm(number) for number in range(count)]


class LeavingOut(Fastest):
    """Does not count prompts on which an arm took ``DISTURBED`` times its usual ratio to the median of the arms."""

    def judge(self, look: Look) -> Judgement:
        ms = np.array([[run.decode_ms for run in look.runs[name]] for name in look.running])
        ratios = ms / np.median(ms, axis=0)
        is_usual = (ratios <= DISTURBED * np.median(ratios, axis=1, keepdims=True)).all(0)
        runs = {
            name: [one for one, usual in zip(look.runs[name], is_usual, strict=True) if usual] for name in look.running
        }
        return super().judge(replace(look, runs={**look.runs, **runs}))


def is_lost(rule: Fastest, count: int, num_prompts: int, noise: Noise, seed: int) -> bool:
    """Whether a race between equal arms loses any of them."""
    arms = arms_of(count, noise, np.random.default_rng(seed), num_prompts)
    done = race(ArmRunner(), arms, prompts_by_hand(num_prompts), rule, seed=seed)
    return len(done.remaining) < count


def is_recommended_by_intervals(noise: Noise, seed: int) -> bool:
    """Whether engines' earlier rule recommends one of two arms that are as fast as no speculation: serving stops once
    the interval of the fastest one lies on one side of a gain of 1 %, and above 1 it is recommended.
    """
    plain, *others = arms_of(3, noise, np.random.default_rng(seed), 60)
    prompts = prompts_by_hand(60)
    ms = np.array([[arm.decode(prompt).decode_ms for prompt in prompts] for arm in (plain, *others)])
    low = high = 1.01
    for num_prompts in range(18, 61, 6):
        first = ms[:, :num_prompts]
        fastest = 1 + int(first[1:].sum(1).argmin())
        low, high = bootstrap_ratio(first[0], first[fastest])
        if not low <= 1.01 <= high:
            break
    return low > 1.0


FINALISTS = Fastest(RISK, ROUNDS[0][0], passes=MAX_PASSES)
HELD_OUT = Fastest(RISK, HELD_OUT_PROMPTS, ends=lambda _: False)
RULES: dict[str, Callable[[Noise, int], bool]] = {
    "Fastest, 2 arms": lambda noise, seed: is_lost(FINALISTS, 2, 16, noise, seed),
    "Fastest, 5 arms": lambda noise, seed: is_lost(FINALISTS, 5, 16, noise, seed),
    "Fastest, 3 arms, each prompt once": lambda noise, seed: is_lost(HELD_OUT, 3, 64, noise, seed),
    "the same without disturbed prompts": lambda noise, seed: is_lost(
        LeavingOut(RISK, HELD_OUT_PROMPTS, ends=lambda _: False), 3, 64, noise, seed
    ),
    "before: 95 % interval of the fastest of 3": is_recommended_by_intervals,
}


def share_of_false_verdicts(rule: str, noise: str = "runs 8 %", *, num_races: int, seed: int = 0) -> float:
    """Share of races between arms of equal speed that name a loser."""
    verdicts = [RULES[rule](NOISES[noise], seed + number) for number in range(num_races)]
    return sum(verdicts) / num_races


def shares_by_noise(rule: str, num_races: int) -> dict[str, float]:
    return {noise: share_of_false_verdicts(rule, noise, num_races=num_races) for noise in NOISES}


def not_slower(num_checks: int) -> dict[str, float]:
    """Of ``check --against``: checks that fail programs of equal speed, by simulated launches of two processes."""
    design = Design()
    return {
        name: simulate(scenario.noise(), 0.0, design, num_checks=num_checks).failed
        for name, scenario in DISTURBANCES.items()
    }


@click.command()
@click.option("--races", default=2000, show_default=True, help="Simulated for each figure.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the shares as JSON.")
def main(races: int, output: Path | None) -> None:
    console = Console()
    shares = {rule: shares_by_noise(rule, races) for rule in RULES}
    rows = [[rule, *(f"{100 * share:.1f} %" for share in of_rule.values())] for rule, of_rule in shares.items()]
    console.table(f"False verdicts in {races} races between equal arms", ["rule", *NOISES], rows)
    launches = not_slower(races)
    rows = [[name, f"{100 * share:.1f} %"] for name, share in launches.items()]
    console.table(f"NotSlower: failures in {races} checks of an unchanged program", ["noise", "failed"], rows)
    if output is not None:
        content = {"races": races, "risk": RISK, "false_verdicts": shares, "not_slower": launches}
        output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
