"""The text tables of SAGE and WETAP on a text target: SAGE's table 4, WETAP's tables 2, 3 and 5 and figure 4.

Every tree decodes held-out prompts with a draft (in the papers a small independent model) in turns with plain decoding.
Prints tokens per round M, pooled and by task, draft nodes and draft levels a round, and the speedup over plain decoding
with its 95 % interval. M and counts do not depend on the machine. WETAP decodes at temperature 1 (section 4.1): give
--temperature 1. Takes about an hour for 24 prompts (an estimate). Models run in float32, in which all outputs equal
plain decoding's.

    python benchmarks/text_tables.py [--target smollm2 --draft smollm2/mtp] [--temperature 1] [--prompts 24]
"""

from __future__ import annotations

from typing import Any

import click
import numpy as np

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR
from autotune.documents.published_defaults import NAMED, PUBLISHED_DEFAULTS
from autotune.documents.table import Table
from autotune.evaluation.summary import bootstrap_ratio
from autotune.modeling.target_defaults import default_workload
from autotune.runtime.model_pool import ModelPool
from autotune.workloads.workload import load_workload

WETAP = PUBLISHED_DEFAULTS["wetap"].tree
TABLES: dict[str, dict[str, dict[str, Any]]] = {
    "SAGE, table 4": {"chain of 5": {"policy": "chain", "depth": 5}, "SAGE": PUBLISHED_DEFAULTS["sage"].tree},
    "WETAP, table 2": {
        "WETAP": WETAP,
        "fixed width": NAMED["wetap-fixed-width"].tree,
        "pruning by probability": NAMED["wetap-probability"].tree,
    },
    "WETAP, table 3": {f"gamma {gamma:g}": WETAP | {"gamma": gamma} for gamma in (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)},
    "WETAP, table 5": {f"length {length}": WETAP | {"length": length} for length in (4, 5, 6, 7, 9, 10)},
    "WETAP, figure 4": {f"width {width}": WETAP | {"w_min": width, "w_max": width} for width in (16, 32, 64)},
}
"""Trees by table and row. The rows gamma 1.2 and length 8 are WETAP's default, and width 128 is its fixed width."""


@click.command()
@click.option("--target", default="smollm2", show_default=True)
@click.option("--draft", default="smollm2/mtp", show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--prompts", default=24, show_default=True)
@click.option("--tokens", default=125, show_default=True, help="Longest answer.")
def main(target: str, draft: str, temperature: float, prompts: int, tokens: int) -> None:
    console, pool = Console(), ModelPool(target, [draft], "cpu", dtype="float32")
    (name,) = pool.references
    workload = load_workload(default_workload(target), "evaluate", num_prompts=prompts).cut(prompts, tokens)
    if temperature > 0:
        workload = workload.sampled(temperature)
    runner = pool.runner(None)
    trees = {f"{table}: {row}": tree for table, rows in TABLES.items() for row, tree in rows.items()}
    arms = [runner.arm(label, Configuration(tree=tree, draft=name)) for label, tree in trees.items()]
    with console.stage("decoding") as update:
        runs = runner.compare(
            [runner.plain, *arms], workload, min_prompts=prompts, report=lambda done, of: update(done, of, "")
        )
    plain = np.array([run.decode_ms for run in runs[AR]])
    rows = []
    for label in trees:
        found = runs[label]
        assert [run.tokens_sha256 for run in found] == [run.tokens_sha256 for run in runs[AR]], "not lossless"
        ms, num_rounds = np.array([run.decode_ms for run in found]), sum(run.rounds for run in found)
        low, high = bootstrap_ratio(plain, ms)
        rows.append(
            [
                label,
                f"{mean_tokens(found):.2f}",
                *(f"{mean_tokens([run for run in found if run.task == task]):.2f}" for task in workload.tasks),
                f"{sum(run.verified_nodes or 0 for run in found) / num_rounds:.1f}",
                f"{sum(run.draft_forwards for run in found) / num_rounds:.2f}",
                f"{plain.sum() / ms.sum():.2f}x ({low:.2f}-{high:.2f})",
            ]
        )
    console.show(
        Table(
            f"{target}, {draft}, temperature {temperature:g}, {prompts} held-out prompts of at most {tokens} tokens; outputs equal plain decoding's",
            ["tree", "M", *workload.tasks, "nodes", "levels", "speedup"],
            rows,
        )
    )


def mean_tokens(runs: list[Decoded]) -> float:
    """Tokens per round, over all rounds."""
    return sum(sum(run.accepted_lengths) + len(run.accepted_lengths) for run in runs) / sum(
        len(run.accepted_lengths) for run in runs
    )


if __name__ == "__main__":
    main()
