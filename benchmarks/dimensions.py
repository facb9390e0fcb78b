"""Ablates the dimensions of the search space: tree, visual tokens, heads, injection layer and draft.

Finds the best configuration when only some dimensions are searched and the others keep the papers' defaults, and
measures all of them in one interleaved run. Needs a study folder of ``autotune search --space full`` over the same
drafts, to which it adds traces. Takes about half an hour.

    python benchmarks/dimensions.py .autotune/STUDY --draft digits/star [--draft digits/dream ...] [--prompts 24]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import pandas as pd

from autotune.cli.options import TABLE_FILE
from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runtime_arms import arms_of_pool
from autotune.evaluation.summary import summarize
from autotune.files import write_table
from autotune.recording.traces import record_traces
from autotune.replay.evaluator import Evaluator
from autotune.runtime.model_pool import ModelPool, variants_of
from autotune.search.screening import ScreenedSubnet, screen_units
from autotune.search.tree_search import search_trees
from autotune.study.ledger import Ledger
from autotune.study.spaces import bounds_of, load_space
from autotune.study.storage import LEDGER, RUNS
from autotune.table import Table
from autotune.workloads.workload import load_workload

# DREAM, section 4: top-4, depth 6, 32 tokens with the root.
DEFAULT_TREE = {"policy": "eagle2", "k": 4, "depth": 6, "budget": 31}
DIMENSIONS = ("tree", "visual tokens", "heads", "injection layer", "draft")


def has_default(one: ScreenedSubnet, dimension: str, default: ScreenedSubnet) -> bool:
    """Whether a subnet equals the default in one dimension."""
    if dimension == "draft":
        return one.draft == default.draft
    if one.draft != default.draft:
        return True  # heads and layers of different drafts cannot be compared
    if dimension == "visual tokens":
        return one.subnet.visual_keep == default.subnet.visual_keep
    if dimension == "heads":
        return one.subnet.head_shares == default.subnet.head_shares
    return one.subnet.injection_layer == default.subnet.injection_layer


def best_subnet(screened: Sequence[ScreenedSubnet], free: Sequence[str], default: ScreenedSubnet) -> ScreenedSubnet:
    """The best subnet, by its best chain, when only the dimensions in ``free`` are searched."""
    fixed = [dimension for dimension in DIMENSIONS[1:] if dimension not in free]
    return next(one for one in screened if all(has_default(one, dimension, default) for dimension in fixed))


@click.command()
@click.argument("study", type=click.Path(path_type=Path, exists=True))
@click.option("--draft", "drafts", multiple=True, required=True, help="Drafts of the study; the first is the default.")
@click.option(
    "--layer", default=10, show_default=True, help="Injection layer of the default draft; STAR: third of the last five."
)
@click.option("--prompts", default=24, show_default=True)
@click.option("--trials", default=200, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--table", type=TABLE_FILE, help="Write a row for every configuration to a .csv or .parquet file.")
def main(
    study: Path, drafts: tuple[str, ...], layer: int, prompts: int, trials: int, seed: int, table: Path | None
) -> None:
    console, space = Console(), load_space("full")
    model_pool = ModelPool("digits/target", drafts, "cpu")
    costs = CostTable.load(max(study.glob("*.cost.json"), key=lambda path: path.stat().st_mtime))
    tune, evaluate = (
        load_workload("digits", "tune", num_prompts=48),
        load_workload("digits", "evaluate", num_prompts=prompts),
    )
    ledger, bounds = Ledger(study / LEDGER), bounds_of(space)
    screened = screen_units(model_pool, 0, variants_of(model_pool, space), costs, tune, study, ledger)
    default = next(
        one
        for one in screened
        if one.draft == drafts[0]
        and set(one.subnet.head_shares) == {1.0}
        and (one.subnet.visual_keep, one.subnet.injection_layer) == (1.0, layer)
    )

    # Cumulative ablation, then all dimensions but one.
    rows = [(f"{'+ ' * (n > 1)}{DIMENSIONS[n - 1]}", DIMENSIONS[:n]) for n in range(1, len(DIMENSIONS) + 1)]
    rows += [(f"all but {one}", tuple(other for other in DIMENSIONS if other != one)) for one in DIMENSIONS]
    configurations = {"papers' defaults": Configuration(tree=DEFAULT_TREE, draft=default.draft, subnet=default.subnet)}
    predicted: dict[str, float] = {}
    for name, free in rows:
        subnet = best_subnet(screened, free, default)
        variants = [one.variant for one in screened if one.draft != default.draft] if "draft" in free else []
        # If the draft is searched, the best subnets of all drafts compete by their trees.
        best_of_draft = {draft: (draft, s) for draft, s in reversed(variants)}
        chosen = list(dict.fromkeys([subnet.variant, *best_of_draft.values()]))
        evaluator = Evaluator(record_traces(model_pool, chosen, tune, study, console, bounds=bounds), costs)
        if "tree" in free:
            documents = [model_pool.key, tune.sha256, costs.content_hash, bounds.model_dump(), "dimensions"]
            found = search_trees(evaluator, space, ledger, num_trials=trials, documents=documents, seed=seed)
            best = evaluator.with_fallback(found.fastest[0])
        else:
            candidates = [evaluator.evaluate(Configuration(tree=DEFAULT_TREE, draft=d, subnet=s)) for d, s in chosen]
            best = evaluator.with_fallback(min(candidates, key=lambda one: one.rank))
        predicted[name] = best.speedup
        configurations[name] = best.configuration

    with console.stage("measured") as update:
        runtime = arms_of_pool(model_pool, costs)
        arms = [runtime.plain, *(runtime.arm(name, c) for name, c in configurations.items())]
        runner = runtime.runner(study / RUNS, context=model_pool.key)
        runs = race(runner, arms, evaluate.prompts, Everyone(), seed=seed, report=update).runs
    cells, rows_of_table = [], []
    for name, configuration in configurations.items():
        summary = summarize(name, runs[name], runs[AR])
        prediction = f"{predicted[name]:.2f}x" if name in predicted else "-"
        interval = f"{summary.ci95[0]:.2f}-{summary.ci95[1]:.2f}"
        label = f"{name}: {configuration.label}"
        cells.append([label, prediction, f"{summary.speedup:.2f}x", interval])
        measured = {"measured": summary.speedup, "low": summary.ci95[0], "high": summary.ci95[1]}
        described = {"dimensions": name, "configuration": configuration.label, "predicted": predicted.get(name)}
        rows_of_table.append(described | measured)
    console.show(
        Table(
            f"Ablation on {prompts} held-out prompts",
            ["searched dimensions", "predicted", "measured", "95 % interval"],
            cells,
        )
    )
    if table is not None:
        write_table(table, pd.DataFrame(rows_of_table))


if __name__ == "__main__":
    main()
