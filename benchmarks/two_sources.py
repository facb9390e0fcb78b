"""Measures the time outside the models in rounds of ``priced`` trees with two sources, a draft and retrieval, by part.

Prompts of the bundled digits are decoded at temperatures 0 and 1 in turns. The share of a round outside the models is
its time without the draft's and the target's forward passes and the choice of tokens, as in
``DecodingStats.overhead_ms``. It is measured first; parts are timed in separate runs, because timing them takes time
too.

All times are CPU times of the main thread, which computes alone, so that they do not contain the time in which other
processes have the core; as these take a part of its caches too, the repeat of every prompt that took least is counted.
Takes about 2 minutes.

    python benchmarks/two_sources.py [--draft digits/star] [--prompts 24] [--repeats 5]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import click
import torch

from autotune.console import Console
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.modeling.loading import BUNDLED_TARGET, reference
from autotune.recording.traces import recorder_of
from autotune.replay.calibration import calibrate
from autotune.replay.trace import bounds_for
from autotune.runtime.decoder import Decoder
from autotune.runtime.generate_args import Request
from autotune.runtime.model_pool import ModelPool
from autotune.runtime.session import Session
from autotune.runtime.stats import DecodingStats
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.policy import TreeGrower
from autotune.trees.priced import PricedPolicy
from autotune.workloads.workload import Workload, load_workload

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.large_vocabularies import Timers

TREE = PricedPolicy(worth=0.5, level_value=0.9, rate=0.05, retrieval=True, skip_draft_above=0.75)
PARTS = {
    "retrieval": ((Session, "_retrieve"),),
    "trees": ((TreeGrower, "set_root"), (TreeGrower, "grow"), (TreeGrower, "prune"), (TreeGrower, "update")),
    "counts of acceptance": ((AcceptanceCounts, "observe"),),
    "emitting": ((Request, "emit"),),
    "choice of the point": ((Session, "_choose_point"),),
}


@contextmanager
def timed_parts() -> Iterator[Timers]:
    found = Timers()
    with ExitStack() as stack:
        for part, functions in PARTS.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, found.timed(part, getattr(owner, name))))
        yield found


def decode(decoder: Decoder, workload: Workload) -> list[DecodingStats]:
    return [
        decoder.generate(**prompt.inputs(decoder.processor), **prompt.settings.generation).stats
        for prompt in workload.prompts
    ]


def round_us(repeats: list[list[DecodingStats]]) -> tuple[float, float]:
    """Time of a round, and its time outside the models, over the fastest repeat of every prompt."""
    stats = [min(of_prompt, key=lambda one: one.decode_ms) for of_prompt in zip(*repeats, strict=True)]
    num_rounds = sum(one.rounds for one in stats)
    outside = sum(one.overhead_ms for one in stats)
    whole = sum(one.decode_ms - one.draft_prefill_ms for one in stats)
    return 1e3 * whole / num_rounds, 1e3 * outside / num_rounds


@click.command()
@click.option("--draft", default="digits/star", show_default=True)
@click.option("--prompts", default=24, show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Limit of the answers' length.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".autotune/two-sources"))
def main(draft: str, prompts: int, tokens: int, repeats: int, folder: Path) -> None:
    """Print the time outside the models, then its parts."""
    console, pool = Console(), ModelPool(BUNDLED_TARGET, [draft], "cpu")
    loaded, recorder = pool.draft(draft), recorder_of(pool, folder)
    tune = load_workload("digits", "tune", num_prompts=prompts).cut(prompts, tokens)
    trace = recorder.trace(loaded, reference(draft), tune, visual_keep=1.0, bounds=bounds_for([TREE]))
    tree = TREE.model_copy(update={"calibration": calibrate(trace)})
    decoder = Decoder(pool.target, loaded, tree=tree, processor=pool.processor, threads=1, prefill_threads=1)
    workload = load_workload("digits", "evaluate", num_prompts=prompts).cut(prompts, tokens)
    workloads = {0.0: workload.sampled(0.0), 1.0: workload.sampled(1.0)}
    for one in workloads.values():
        decode(decoder, one.cut(2))
    measured: dict[float, list[list[DecodingStats]]] = {temperature: [] for temperature in workloads}
    parts: dict[float, dict[str, float]] = {}
    monitor = ContentionMonitor()
    with patch.object(time, "perf_counter", time.thread_time):
        for _ in range(repeats):
            for temperature, one in workloads.items():
                measured[temperature].append(decode(decoder, one))
        for temperature, one in workloads.items():
            with timed_parts() as timers:
                num_rounds = sum(stats.rounds for stats in decode(decoder, one))
            parts[temperature] = {part: 1e3 * timers.ms[part] / num_rounds for part in PARTS}
    contention = monitor.contention()
    rows = []
    for temperature, found in measured.items():
        whole, outside = round_us(found)
        figures = f"{whole:,.0f}", f"{outside:.0f}", f"{100 * outside / whole:.2f} %"
        rows.append([f"{temperature:g}", *figures, *(f"{us:.0f}" for us in parts[temperature].values())])
    columns = ["T", "round, us", "outside, us", "share of a round", *(f"{part}, us" for part in PARTS)]
    console.table(f"{draft} and retrieval, {prompts} prompts, {repeats} repeats", columns, rows)
    console.say(contention.describe("while rounds were timed"))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
