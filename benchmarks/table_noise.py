"""Compares cost tables of ratios with cost tables of milliseconds, beside a process that burns one core in every second
second.

Each table is measured once and read twice from its samples: with every sample scaled by the plain steps beside it, as
``autotune measure`` does, and unscaled. Tables without and with the burning process take turns. The table printed at
the end shows, by tree, how far apart the predicted costs of the tables lie (standard deviation over mean). Ten tables
take about six minutes.

    python benchmarks/table_noise.py [--tables 5] [--seconds 30]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import pandas as pd

from autotune.documents.subnet import Subnet
from autotune.measuring.jobs import BlockLog
from autotune.measuring.measurement import kv_lengths_for, measure_costs
from autotune.measuring.settings import CostSettings
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET
from autotune.runtime.model_pool import ModelPool
from autotune.workloads.workload import load_workload

TREES: dict[str, tuple[int, tuple[int, ...]]] = {
    "chain of 1": (2, ()),
    "chain of 3": (4, (1, 1)),
    "8 nodes": (9, (4, 4)),
    "32 nodes": (33, (9, 9)),
}
"""Tokens of a round: verified, and of each draft level after the first. They are sizes of the coarse grid."""
COMMITTED = 2
BURN = """
import time
started = time.monotonic()
while True:
    if (time.monotonic() - started) % 2 < 1:
        sum(range(1000))
    else:
        time.sleep(0.005)
"""


@contextmanager
def burning(is_on: bool) -> Iterator[None]:
    """Run a process that keeps one core busy for one second out of two."""
    if not is_on:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def speedups(
    log: BlockLog, kv_lengths: tuple[int, int], num_drafts: int, *, scaled: bool
) -> dict[tuple[str, int], float]:
    """Plain steps per round, by tree and draft: the speedup of a tree is this figure times the tokens of a round."""
    samples: dict[tuple[str, int, int], list[float]] = {}
    for job in (job for block in log.blocks for job in block.jobs):
        for part, tokens, kv_length, ms in job.samples:
            samples.setdefault((part, tokens, kv_length), []).append(ms / (job.reference_ms if scaled else 1.0))
    found: dict[tuple[str, int], float] = {}
    for tree, (verified, levels) in TREES.items():
        for draft in range(num_drafts):
            sizes = [("verify", verified), (f"draft_first {draft}", COMMITTED)]
            sizes += [(f"draft_level {draft}", tokens) for tokens in levels]
            ratios = [
                np.median(samples["decode", 1, m]) / sum(np.median(samples[part, n, m]) for part, n in sizes)
                for m in kv_lengths
            ]
            found[tree, draft] = float(np.mean(ratios))
    return found


@click.command()
@click.option("--tables", default=5, show_default=True, help="Tables without and with the burning process, each.")
@click.option("--seconds", default=30.0, show_default=True, help="Time limit of a table.")
def main(tables: int, seconds: float) -> None:
    drafts = (BUNDLED_DRAFT, "digits/star")
    pool = ModelPool(BUNDLED_TARGET, drafts, "cpu")
    loaded = [(pool.draft(draft, Subnet()), pool.references[draft]) for draft in drafts]
    workload = load_workload("digits", "tune", num_prompts=48)
    kv_lengths = kv_lengths_for(150, 310)
    settings = CostSettings(kv_lengths=kv_lengths, time_limit_s=seconds)
    rows = []
    for number in range(2 * tables):
        is_busy = number % 2 == 1
        with tempfile.TemporaryDirectory() as folder, burning(is_busy):
            path = Path(folder) / "samples.jsonl"
            arguments = pool.target, pool.target_reference, loaded, pool.processor, workload
            table = measure_costs(*arguments, settings=settings, log=BlockLog(path), say=click.echo)
            log = BlockLog(path)
        assert table.provenance.contention is not None
        click.echo(f"{table.num_samples} samples; {table.provenance.contention.describe('meanwhile')}")
        for scaled in (False, True):
            found = speedups(log, (kv_lengths[0], kv_lengths[-1]), len(drafts), scaled=scaled)
            for (tree, draft), value in found.items():
                case = "burning" if is_busy else "as it is"
                unit = "ratios" if scaled else "milliseconds"
                rows.append({"case": case, "samples": unit, "tree": f"{tree}, {drafts[draft]}", "value": value})
    spread = pd.DataFrame(rows).pivot_table(
        index="tree", columns=["case", "samples"], values="value", aggfunc=lambda values: values.std() / values.mean()
    )
    spread.loc["median"] = spread.median()
    click.echo(spread.map(lambda share: f"{100 * share:.1f} %").to_string())


if __name__ == "__main__":
    main()
