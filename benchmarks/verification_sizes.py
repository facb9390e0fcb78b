"""What trees gain from the latency of every number of verified tokens, in replay.

Needs a study folder of ``autotune search`` on a CPU. Times verifications of 1 to 33 tokens with one thread and with all
of them, in random order. Then the trees of the space are priced by two tables: one knows every size, the other a grid
of some sizes and interpolates between them. The fastest tree of each table is replayed with the prices of all sizes.
Both tables have the study's other costs. Takes about a minute.

    python benchmarks/verification_sizes.py .autotune/STUDY --draft digits/mtp [--space quick] [--policy priced]
    [--policy sage]
"""

from __future__ import annotations

import random
from pathlib import Path

import click
import numpy as np
import torch

from autotune.console import Console
from autotune.cost.surface import Point, Surface
from autotune.cost.table import EVERY_ROW, CostTable
from autotune.documents.configuration import Configuration
from autotune.measuring.settings import CostSettings
from autotune.measuring.step_bench import StepBench
from autotune.modeling.host import limited_threads
from autotune.replay.evaluator import Evaluator
from autotune.replay.trace import load_trace
from autotune.runtime.model_pool import ModelPool
from autotune.study.document import load_study
from autotune.study.spaces import load_space

KV_LENGTH = 270
LARGEST = (48, 65, 129)
GRID = (1, 2, 3, 4, 6, 9, 12, 17, 24, 33, *LARGEST)
"""Sizes between which a table interpolates that does not look at every one."""
REPEATS = 40
SWEPT = 1024  # trees of a policy that cannot be enumerated


def verification_steps(bench: StepBench, threads: int) -> dict[int, float]:
    """Median latency of every number of verified tokens, in plain steps."""
    sizes = [*EVERY_ROW, *LARGEST]
    samples: dict[int, list[float]] = {size: [] for size in (0, *sizes)}
    with torch.inference_mode(), limited_threads(threads):
        for _ in range(REPEATS):
            random.shuffle(sizes)
            for size in sizes:
                bench.draft_level_ms(1, KV_LENGTH)  # as in decoding, a draft runs before
                samples[size].append(bench.verify_ms(size, KV_LENGTH))
            bench.draft_level_ms(1, KV_LENGTH)
            samples[0].append(bench.decode_ms(KV_LENGTH))
    plain = float(np.median(samples.pop(0)))
    return {size: float(np.median(ms)) / plain for size, ms in samples.items()}


def with_verification(costs: CostTable, steps: dict[int, float], sizes: tuple[int, ...]) -> CostTable:
    """A cost table with these latencies of verifications, at every KV length, interpolated between ``sizes``."""
    plain = costs.decode.latency_ms(np.array([1.0]), np.array([float(KV_LENGTH)])).item()
    lengths = sorted({point.kv_length for point in costs.verify.points})
    points = [Point(tokens=n, kv_length=m, samples_ms=[plain * steps[n]]) for n in sizes for m in lengths]
    return costs.model_copy(update={"verify": Surface(points=points)})


@click.command()
@click.argument("study", type=click.Path(path_type=Path, exists=True))
@click.option("--draft", required=True, help="A draft of the study.")
@click.option("--space", default="quick", show_default=True)
@click.option("--policy", "policies", multiple=True, default=("priced", "sage", "eagle2", "chain"), show_default=True)
def main(study: Path, draft: str, space: str, policies: tuple[str, ...]) -> None:
    console, trees, document = Console(), load_space(space), load_study(study)
    assert document is not None, "the folder holds no study"
    traces = [load_trace(path) for path in sorted(study.glob("traces/**/*.trace.json"))]
    traces = [trace for trace in traces if trace.header.draft.id == draft]
    costs = max((CostTable.load(path) for path in study.glob("*.cost.json")), key=lambda t: t.provenance.created)
    pool = ModelPool(document.target.id, [draft], "cpu")
    bench = StepBench(pool.target, pool.draft(draft), CostSettings(kv_lengths=(KV_LENGTH,)))
    for threads in sorted({1, torch.get_num_threads()}):
        steps = verification_steps(bench, threads)
        console.say(
            f"threads: {threads}; verifications in plain steps: " + ", ".join(f"{n}: {steps[n]:.2f}" for n in steps)
        )
        truth = Evaluator(traces, with_verification(costs, steps, (*EVERY_ROW, *LARGEST)))
        (variant,) = truth.traces
        rows = []
        for policy in policies:
            chosen = trees.enumerated(policy) or trees.sweep(policy, SWEPT, 0)
            speedups: list[str] = []
            for sizes in ((*EVERY_ROW, *LARGEST), GRID):
                evaluator = Evaluator(traces, with_verification(costs, steps, sizes))
                found = [
                    evaluator.resolve(Configuration(tree=tree, draft=variant[0], subnet=variant[1])) for tree in chosen
                ]
                results = evaluator.replay_many(found)
                best = min(range(len(results)), key=lambda row: results[row].ms_per_token)
                true = truth.replay(found[best])
                predicted = evaluator.ar_ms_per_token / results[best].ms_per_token
                speedups += [f"{predicted:.3f}x", f"{truth.ar_ms_per_token / true.ms_per_token:.3f}x"]
            rows.append([policy, *speedups])
        columns = ["tree", "every size: predicted", "with all prices", "grid: predicted", "with all prices"]
        console.table(f"The fastest trees of {draft}, threads: {threads}", columns, rows)


if __name__ == "__main__":
    main()
