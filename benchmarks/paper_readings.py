"""Measures how the readings of SAGE's and WETAP's papers differ: tokens per round (M), nodes and draft forwards a
round, and the predicted time per token on two devices.

Records traces of held-out prompts, for SAGE with the share of the visual tokens that it keeps and for the others with
all, and replays every reading, other published trees and chains of 5 and 8 over them. M, nodes and draft forwards are
counts. Times are predictions: by a cost table that ``autotune measure`` has measured on this machine, and by the
datasheet of a GPU.

Takes about 4 minutes for each draft on two cores.

    autotune measure --draft digits/independent --draft digits/star -o digits.cost.json
    python benchmarks/paper_readings.py --draft digits/independent --draft digits/star --cost digits.cost.json
    autotune measure --target smollm2 --draft smollm2/mtp -o smollm2.cost.json
    python benchmarks/paper_readings.py --target smollm2 --draft smollm2/mtp --cost smollm2.cost.json --prompts 8
    python benchmarks/paper_readings.py --draft digits/independent --paper sage --all
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import click

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, Tree
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.documents.subnet import Subnet
from autotune.modeling.loading import BUNDLED_TARGET
from autotune.modeling.target_defaults import default_workload
from autotune.recording.traces import record_traces
from autotune.replay.evaluator import Evaluator
from autotune.replay.trace import ForestBounds
from autotune.runtime.model_pool import ModelPool
from autotune.search.prices import table_for_gpu
from autotune.table import Table
from autotune.trees.base import bounds_for
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import load_workload

READINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "sage": {
        "below_threshold": ("leaf", "drop"),
        "threshold_on": ("path", "token"),
        "rounding": ("nearest", "floor", "ceil"),
        "plan": ("current", "previous"),
        "confidence": ("previous", "current"),
        "depth_cap": (8, 10, 12),
    },
    "wetap": {"entropy_of": ("path", "token"), "nucleus": ("top_k", "all")},
}
"""The values of the hyperparameters that are readings of a paper's text, by the published default."""
OTHERS = {
    "sage": ("chain", "sd-tree"),
    "wetap": ("chain", "sd-tree", "eagle2", "eagle2-release", "specvlm", "dream", "dream-release"),
}
"""Published trees in the table of a paper; EAGLE's released code reads its own settings otherwise."""
LONG_CHAIN = {"policy": "chain", "depth": 8}
"""SAGE compares with a chain whose length it does not give; this one is as deep as SAGE's trees get."""


def readings(name: str, every_combination: bool) -> list[Tree]:
    """The published default, then the readings that differ from it in one hyperparameter, or all combinations
    of them.
    """
    published, options = PUBLISHED_DEFAULTS[name].tree, READINGS[name]
    if every_combination:
        return [published | dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    default = parse_policy(published).hyperparameters
    changes = [{key: value} for key, values in options.items() for value in values if value != default[key]]
    return [published | change for change in [{}, *changes]]


def bounds_of(trees: list[Tree]) -> ForestBounds:
    """The nodes to record: a threshold on the last token alone expands improbable paths too."""
    bounds = bounds_for([parse_policy(tree) for tree in trees])
    return bounds.model_copy(update={"beam": max(16, bounds.beam), "beam_depth": max(12, bounds.beam_depth)})


@click.command()
@click.option("--target", default=BUNDLED_TARGET, show_default=True)
@click.option("--draft", "drafts", multiple=True, required=True)
@click.option(
    "--paper", "papers", type=click.Choice([*READINGS]), multiple=True, default=[*READINGS], show_default=True
)
@click.option("--keep", default=0.2, show_default=True, help="Share of the visual tokens that SAGE's draft reads.")
@click.option("--prompts", default=16, show_default=True)
@click.option("--cost", type=click.Path(path_type=Path, exists=True), help="Cost table of this machine.")
@click.option("--gpu", default="h100", show_default=True, help="Device whose datasheet prices the rounds.")
@click.option("--jobs", default=None, type=int, help="Processes that record.")
@click.option("--all", "every_combination", is_flag=True, help="Replay all combinations of the readings.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".autotune/paper-readings"), show_default=True)
def main(
    target: str,
    drafts: tuple[str, ...],
    papers: tuple[str, ...],
    keep: float,
    prompts: int,
    cost: Path | None,
    gpu: str,
    jobs: int | None,
    every_combination: bool,
    folder: Path,
) -> None:
    console = Console()
    workload = load_workload(default_workload(target), "evaluate", num_prompts=prompts)
    has_images = any(prompt.pixels for prompt in workload.prompts)
    for draft, paper in itertools.product(drafts, papers):
        model_pool = ModelPool(target, [draft], "cpu")
        others = [PUBLISHED_DEFAULTS[name].tree for name in OTHERS[paper]]
        trees = [LONG_CHAIN, *others, *readings(paper, every_combination)]
        subnet = Subnet(visual_keep=keep if paper == "sage" and has_images else 1.0)
        variant = next(iter(model_pool.references)), subnet
        traces = record_traces(model_pool, [variant], workload, folder, console, bounds=bounds_of(trees), jobs=jobs)
        tables = {gpu: table_for_gpu(gpu, model_pool, [variant])}
        if cost is not None:
            tables = {"this machine": CostTable.load(cost)} | tables
        evaluators = {name: Evaluator(traces, table) for name, table in tables.items()}
        rows = []
        for tree in trees:
            configuration = Configuration(tree=tree, draft=variant[0], subnet=subnet)
            replays = [evaluator.replay(configuration) for evaluator in evaluators.values()]
            found, rounds = replays[0], replays[0].rounds.sum()
            rows.append(
                [
                    configuration.tree_label,
                    f"{found.tokens_per_round:.2f}",
                    *(
                        f"{counts.sum() / rounds:.2f}"
                        for counts in (found.verified_nodes, found.draft_forwards, found.missing)
                    ),
                    *(f"{replayed.ms_per_token:.3f}" for replayed in replays),
                ]
            )
        plain = ", ".join(f"{e.ar_ms_per_token:.2f} ms on {name}" for name, e in evaluators.items())
        console.show(
            Table(
                f"{paper}: {draft}, keep {subnet.visual_keep:g}, {prompts} held-out prompts; predicted ms a token, "
                f"plain decoding {plain}",
                ["tree", "M", "nodes", "draft forwards", "missing a round", *tables],
                rows,
            )
        )


if __name__ == "__main__":
    main()
