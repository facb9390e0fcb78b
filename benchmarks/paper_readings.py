"""Measures how the readings of SAGE's paper differ: tokens per round (M), nodes and draft forwards a round, and the predicted
time per token on a device whose nodes are nearly free.

Records a trace of held-out prompts of the bundled pair with the share of visual tokens that SAGE keeps, and replays every
reading and a chain of 5 over it. The time is estimated from the device's datasheet. A draft takes about a minute on two cores.

    python benchmarks/sage_readings.py [--draft digits/independent] [--prompts 16] [--gpu h100] [--all]
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import click

from autotune.acceptance.trace import bounds_for
from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.documents.subnet import Subnet
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET
from autotune.prediction.evaluator import Evaluator
from autotune.search.cost_tables import table_for_gpu
from autotune.search.model_pool import ModelPool
from autotune.search.traces import record_traces
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import load_workload

CHAIN = {"policy": "chain", "depth": 5}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "below_threshold": ("leaf", "drop"),
    "threshold_on": ("path", "token"),
    "rounding": ("nearest", "floor", "ceil"),
    "plan": ("current", "previous"),
    "confidence": ("previous", "current"),
    "depth_cap": (8, 10, 12),
}


def readings(every_combination: bool) -> list[dict[str, Any]]:
    """The published default, then the readings that differ from it in one option, or all combinations."""
    if every_combination:
        return [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    default = parse_policy(PUBLISHED_DEFAULTS["sage"].tree).hyperparameters
    changes = [{name: value} for name, values in OPTIONS.items() for value in values if value != default[name]]
    pairs = [
        {name: value for name, value in zip(("below_threshold", "threshold_on", "plan"), values, strict=True)}
        for values in itertools.product(*(OPTIONS[name] for name in ("below_threshold", "threshold_on", "plan")))
    ]
    several = [pair for pair in pairs if sum(default[name] != pair[name] for name in pair) > 1]
    return [PUBLISHED_DEFAULTS["sage"].tree | reading for reading in [{}, *changes, *several]]


@click.command()
@click.option("--draft", default=BUNDLED_DRAFT, show_default=True)
@click.option("--keep", default=0.2, show_default=True, help="Share of the visual tokens that the draft reads.")
@click.option("--prompts", default=16, show_default=True)
@click.option("--gpu", default="h100", show_default=True, help="Device whose datasheet prices the rounds.")
@click.option("--jobs", default=None, type=int, help="Processes that record.")
@click.option("--all", "every_combination", is_flag=True, help="Replay all combinations of the options.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".autotune/sage-readings"), show_default=True)
def main(
    draft: str, keep: float, prompts: int, gpu: str, jobs: int | None, every_combination: bool, folder: Path
) -> None:
    model_pool, console = ModelPool(BUNDLED_TARGET, [draft], "cpu"), Console()
    variant = next(iter(model_pool.references)), Subnet(visual_keep=keep)
    workload = load_workload("digits", "evaluate", num_prompts=prompts)
    trees = [CHAIN, *({"policy": "sage"} | reading for reading in readings(every_combination))]
    # A threshold on the last token alone expands improbable paths too.
    bounds = bounds_for([parse_policy(tree) for tree in trees]).model_copy(update={"beam": 16, "beam_depth": 12})
    traces = record_traces(model_pool, [variant], workload, folder, console, bounds=bounds, jobs=jobs)
    evaluator = Evaluator(traces, table_for_gpu(gpu, model_pool, [variant]))
    rows = []
    for tree in trees:
        configuration = Configuration(tree=tree, draft=variant[0], subnet=variant[1])
        found = evaluator.replay(configuration)
        rounds = found.rounds.sum()
        rows.append(
            [
                configuration.tree_label,
                f"{found.tokens_per_round:.2f}",
                f"{found.verified_nodes.sum() / rounds:.1f}",
                f"{found.draft_forwards.sum() / rounds:.2f}",
                f"{found.missing.sum() / rounds:.2f}",
                f"{found.ms_per_token:.2f}",
                f"{evaluator.ar_ms_per_token / found.ms_per_token:.2f}x",
            ]
        )
    console.table(
        f"{draft}, keep {keep:g}, {prompts} held-out prompts; times estimated for {gpu}",
        ["tree", "M", "nodes", "draft forwards", "missing a round", "ms a token", "speedup"],
        rows,
    )


if __name__ == "__main__":
    main()
