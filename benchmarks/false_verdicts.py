"""Estimates how often a race between arms of equal speed names a loser: the share of false verdicts over all looks.

The rules judge simulated times as they do in a search. Beside them stands the rule that engines had before: a 95 %
bootstrap interval of the fastest of three arms, after 18, 24, ... 60 prompts. Takes about 10 minutes.

    python benchmarks/false_verdicts.py [--races 2000] [--output benchmarks/results/false-verdicts.json]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from autotune.console import Console
from autotune.evaluation.not_slower import Design, Floats
from autotune.evaluation.race import Fastest, Judgement, Look
from autotune.evaluation.summary import NUM_RESAMPLES
from autotune.search.thresholds import HELD_OUT_PROMPTS, MAX_PASSES, RACE_SIZES, RISK
from autotune.table import Table
from benchmarks.check_power import SCENARIOS, simulate
from benchmarks.evidence.result import stamped


@dataclass(frozen=True)
class Noise:
    """Standard deviations of log times."""

    run: float = 0.05
    """Between runs."""
    prompt: float = 0.0
    """Between prompts: an arm's own on a prompt, in every run of it."""
    process: float = 0.0
    """Between processes: an arm's own in all runs of a race."""
    spikes: float = 0.0
    """Share of runs that take twice as long."""

    def times(self, rng: np.random.Generator, num_arms: int, num_prompts: int, passes: int) -> Floats:
        """Times of arms of equal speed, [arms, passes * prompts]."""
        shape = num_arms, passes, num_prompts
        log_times = rng.normal(0, self.run, shape) + math.log(2) * (rng.random(shape) < self.spikes)
        log_times += rng.normal(0, self.prompt, (num_arms, 1, num_prompts))
        log_times += rng.normal(0, self.process, (num_arms, 1, 1))
        return np.asarray(np.exp(log_times).reshape(num_arms, -1))


NOISES = {
    "runs 5 %": Noise(),
    "2 % of them take twice as long": Noise(spikes=0.02),
    "prompts 15 %": Noise(prompt=0.15),
    "processes 0.5 %": Noise(process=0.005),
}


class Run(NamedTuple):
    """The fields of a record that a rule reads."""

    decode_ms: float
    prompt_sha256: str
    new_tokens: int = 2
    cpu_ms: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """A race of ``Fastest`` between equal arms."""

    num_arms: int
    num_prompts: int
    rule: Fastest

    def loses_an_arm(self, noise: Noise, rng: np.random.Generator) -> bool:
        times = noise.times(rng, self.num_arms, self.num_prompts, self.rule.passes)
        prompts: Any = [f"{number}" for number in range(self.num_prompts)]  # blocks are made of whatever they are
        blocks = self.rule.blocks(prompts)
        runs: dict[str, Any] = {f"{arm}": [] for arm in range(self.num_arms)}
        judged = Judgement([*runs], [*runs])
        num_done = 0
        for number, block in enumerate(blocks):
            for name in judged.running:
                ms = times[int(name), num_done : num_done + len(block)]
                runs[name] += map(Run, ms.tolist(), block)
            num_done += len(block)
            seconds = dict.fromkeys(judged.running, 0.0)
            counts = num_done, times.shape[1] - num_done
            look = Look(number, len(blocks), runs, judged.running, judged.remaining, *counts, math.inf, seconds)
            judged = self.rule.judge(look)
            if not judged.running:
                break
        return len(judged.remaining) < self.num_arms


FINALISTS = Fastest(RISK, RACE_SIZES[0][0], passes=MAX_PASSES)
HELD_OUT = Fastest(RISK, HELD_OUT_PROMPTS, ends=lambda _: False)
RULES = {
    "Fastest, 2 arms, 16 prompts four times": Simulated(2, 16, FINALISTS),
    "Fastest, 5 arms, 16 prompts four times": Simulated(5, 16, FINALISTS),
    "Fastest, 3 arms, 64 prompts": Simulated(3, 64, HELD_OUT),
    "Fastest, 3 arms, 64 prompts, 1 % tolerated": Simulated(3, 64, replace(HELD_OUT, tolerance=0.01)),
}


def false_verdicts(rule: str, noise: str, *, num_races: int, seed: int = 0) -> float:
    """Share of races that name a loser."""
    rng = np.random.default_rng(seed)
    return sum(RULES[rule].loses_an_arm(NOISES[noise], rng) for _ in range(num_races)) / num_races


def recommended_by_intervals(noise: str, *, num_races: int, seed: int = 0) -> float:
    """Share of races in which engines' earlier rule recommends one of two arms that are as fast as no speculation: it
    stopped once the interval of the fastest lay on one side of a gain of 1 %, and recommended it above 1.
    """
    rng = np.random.default_rng(seed)
    times = np.stack([NOISES[noise].times(rng, 3, 60, 1) for _ in range(num_races)])
    is_open = np.full(num_races, True)
    low = np.zeros(num_races)
    for num_prompts in range(18, 61, 6):
        first = times[is_open, :, :num_prompts]
        fastest = 1 + first[:, 1:].sum(-1).argmin(-1)
        counts = rng.multinomial(num_prompts, [1 / num_prompts] * num_prompts, size=NUM_RESAMPLES)
        ratios = (first[:, 0] @ counts.T) / (first[np.arange(len(first)), fastest] @ counts.T)
        low[is_open], high = np.quantile(ratios, [0.025, 0.975], axis=-1)
        is_open[is_open] = (low[is_open] <= 1.01) & (high >= 1.01)
    return float((low > 1.0).mean())


@click.command()
@click.option("--races", default=2000, show_default=True, help="Simulated for each figure.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the shares as JSON.")
def main(races: int, output: Path | None) -> None:
    console = Console()
    shares = {rule: {noise: false_verdicts(rule, noise, num_races=races) for noise in NOISES} for rule in RULES}
    shares["before: 95 % interval of the fastest of 3"] = {
        noise: recommended_by_intervals(noise, num_races=races) for noise in NOISES
    }
    rows = [[rule, *(f"{100 * share:.1f} %" for share in of_rule.values())] for rule, of_rule in shares.items()]
    console.show(Table(f"False verdicts in {races} races between equal arms", ["rule", *NOISES], rows))
    checks = {
        name: simulate(scenario.noise(), 0.0, Design(), num_checks=races).failed for name, scenario in SCENARIOS.items()
    }
    rows = [[name, f"{100 * share:.1f} %"] for name, share in checks.items()]
    console.show(Table(f"NotSlower: unchanged programs that fail, of {races}", ["noise", "failed"], rows))
    if output is not None:
        fields = {
            "source": "counted",
            "machine": "any",
            "command": f"python benchmarks/false_verdicts.py --races {races}",
            "note": f"shares of races between equal arms that name a loser; risk {RISK:g} over all looks",
            "values": {
                "false_verdicts": [{"rule": rule, **of_rule} for rule, of_rule in shares.items()],
                "not_slower": [{"noise": name, "failed": share} for name, share in checks.items()],
            },
        }
        stamped(output.stem, **fields).save(output)


if __name__ == "__main__":
    main()
