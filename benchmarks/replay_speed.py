"""Measures how many configurations one core replays per second, by tree policy, and how much faster that is than
decoding.

Records a trace of the bundled pair with all nodes of WETAP's widest trees, then times replays on one thread: the
published default of each policy, and configurations spread over the ``quick`` space. Replays are timed by the CPU time
of their thread, which other processes change less than the wall clock. Takes about 5 minutes, of which recording is 3.

    python benchmarks/replay_speed.py [--prompts 64] [--configurations 40] [--policy priced] [--folder
    .autotune/replay-speed]
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import click
import numpy as np

from autotune.console import Console
from autotune.cost.request_costs import Overhead, PrefillCost
from autotune.cost.table import DensePrices
from autotune.documents.configuration import Configuration
from autotune.documents.subnet import Subnet
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET
from autotune.recording.traces import record_traces
from autotune.replay.prices import TreePricing
from autotune.replay.replay import replay
from autotune.replay.sequoia import rank_acceptance, sequoia_trees
from autotune.replay.trace import Trace, bounds_for
from autotune.runtime.model_pool import ModelPool
from autotune.study.spaces import load_space
from autotune.table import Table
from autotune.trees.policy import POLICIES, Policy, parse_policy
from autotune.workloads.workload import Workload, load_workload

WIDEST = {"policy": "wetap", "w_min": 16, "w_max": 128, "budget": 64}
DEFAULTS: dict[str, dict[str, object]] = {
    "chain": {"policy": "chain"},
    "static": {"policy": "static"},
    "eagle2": {"policy": "eagle2"},
    "sage": {"policy": "sage"},
    "wetap": WIDEST,
    "priced": {"policy": "priced", "retrieval": True},
}


def prices() -> DensePrices:
    """Prices in plain steps of about those of the bundled pair on a CPU. Looking up a price takes the same time
    whatever its value, but the size of ``priced`` trees depends on it.
    """
    free = PrefillCost(intercept_ms=0.0, per_token_ms=0.0, image_ms=0.0, samples=[])
    nodes = np.repeat(np.arange(130.0)[:, None], 40, axis=1)
    draft, verify = 0.15 + 0.01 * nodes, 1.0 + 0.02 * nodes
    return DensePrices(np.ones(40), draft, draft, verify, 16, Overhead(round_ms=0, level_ms=0), free)


def ms_of(trace: Trace, policy: Policy, at: DensePrices) -> float:
    """Median CPU time of five replays on one thread."""
    replay(trace, policy, at)
    samples = []
    for _ in range(5):
        started = time.thread_time()
        replay(trace, policy, at)
        samples.append(1e3 * (time.thread_time() - started))
    return statistics.median(samples)


def drawn(trace: Trace, name: str, count: int, rng: random.Random) -> list[Policy]:
    """Policies spread over the space ``quick``; for ``static``, random ones of Sequoia's trees."""
    space, pricing = load_space("quick"), TreePricing(trace, prices())
    if POLICIES[name].template_sizes:
        return list(rng.sample(sequoia_trees(rank_acceptance(trace), budgets=range(4, 65), depths=range(2, 11)), count))
    return [parse_policy(pricing.complete(tree)) for tree in space.sweep(name, count, rng.randrange(1 << 31))]


@click.command()
@click.option("--prompts", default=64, show_default=True)
@click.option("--configurations", default=40, show_default=True)
@click.option("--decoded", default=8, show_default=True, help="Prompts to decode for comparison.")
@click.option("--policy", "names", multiple=True, type=click.Choice(list(DEFAULTS)), help="By default all.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".autotune/replay-speed"), show_default=True)
def main(prompts: int, configurations: int, decoded: int, names: tuple[str, ...], folder: Path) -> None:
    defaults = {name: DEFAULTS[name] for name in names or DEFAULTS}
    model_pool, console = ModelPool(BUNDLED_TARGET, [BUNDLED_DRAFT], "cpu"), Console()
    workload = load_workload("digits", "tune", num_prompts=prompts)
    bounds = bounds_for(parse_policy(tree) for tree in defaults.values())
    (trace,) = record_traces(model_pool, [(BUNDLED_DRAFT, Subnet())], workload, folder, console, bounds=bounds)
    console.say(f"{trace.num_prompts} prompts, {trace.num_tokens} tokens, {len(trace.forest.child_token)} forest nodes")

    few = Workload(workload.name, workload.split, workload.prompts[:decoded])
    runner = model_pool.runner(None)
    runs = runner.compare([runner.arm(name, Configuration(tree=tree)) for name, tree in defaults.items()], few)
    rng, at, rows = random.Random(0), prices(), []
    for name, tree in defaults.items():
        default = parse_policy(tree)
        found = replay(trace, default, at)
        default_ms = ms_of(trace, default, at)
        random_ms = statistics.mean(ms_of(trace, policy, at) for policy in drawn(trace, name, configurations, rng))
        # Decoding time of the decoded prompts, scaled to all prompts by tokens.
        decode_ms = sum(run.decode_ms for run in runs[name])
        decode_ms *= trace.num_tokens / sum(run.new_tokens - 1 for run in runs[name])
        rows.append(
            [
                name,
                f"{1e3 / default_ms:,.0f}",
                f"{1e3 * default_ms / found.rounds.sum():.2f}",
                f"{found.missing.sum() / found.rounds.sum():.2f}",
                f"{1e3 / random_ms:,.0f}",
                f"{decode_ms / 1e3:.1f}",
                f"{decode_ms / default_ms:,.0f}",
            ]
        )
    console.show(
        Table(
            f"Replay on one core, {trace.num_prompts} prompts",
            [
                "policy",
                "default, configs/s",
                "us a round",
                "missing a round",
                "of quick, configs/s",
                "decoding, s",
                "times faster",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
