"""Compares ``priced`` trees with the best trees of every other policy, in replay on prompts that neither were chosen
on.

Needs a study folder of ``autotune search``. For every recorded draft variant, each policy's trees of the space are
replayed over two thirds of the tuning prompts of each task; the fastest tree of each policy is then replayed over the
others. Prints the predicted time of a token on both, and by how much ``priced`` is faster than the best other policy.
Takes about a minute.

With ``--measured N`` both trees also decode N prompts of the evaluation, in turns, three times (about 5 minutes a draft
for 64).

    python benchmarks/priced_trees.py .autotune/STUDY [--space quick] [--swept 2048] [--draft digits/star] [--measured
    64]
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, DraftVariant, Tree
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR
from autotune.documents.search_space import SearchSpace
from autotune.evaluation.summary import bootstrap_ratio
from autotune.replay.evaluator import Evaluator
from autotune.replay.trace import load_trace
from autotune.runtime.model_pool import ModelPool
from autotune.search.tuning_prompts import confirms
from autotune.study.document import load_study
from autotune.study.spaces import load_space
from autotune.trees.policy import POLICIES
from autotune.workloads.workload import load_workload

SEED = 0
PASSES = 3  # of measurements


def trees_of(
    policy: str, space: SearchSpace, evaluator: Evaluator, variant: DraftVariant, num_swept: int
) -> list[Tree]:
    """All trees of a policy where they can be enumerated, else ``num_swept`` spread evenly over the space."""
    if POLICIES[policy].is_template():
        return evaluator.template_trees(variant, space.values(policy))
    return space.enumerated(policy) or space.sweep(policy, num_swept, SEED)


def measured(
    study: Path, costs: CostTable, trees: dict[str, Configuration], num_prompts: int
) -> dict[str, NDArray[np.float64]]:
    """Decoding times of trees and of plain decoding on prompts of the evaluation: the median of each prompt's passes,
    ms.
    """
    document = load_study(study)
    assert document is not None, "the folder holds no study"
    runner = ModelPool(document.target.id, [draft.reference.id for draft in document.drafts], "cpu").runner(costs)
    prompts = load_workload(document.workload, "evaluate", num_prompts=num_prompts)
    arms = [runner.plain, *(runner.arm(name, tree) for name, tree in trees.items())]
    passes: list[dict[str, list[Decoded]]] = [
        runner.compare(arms, prompts, seed=number, min_prompts=num_prompts, repeat=number) for number in range(PASSES)
    ]
    return {name: np.median([[run.decode_ms for run in runs[name]] for runs in passes], axis=0) for name in passes[0]}


@click.command()
@click.argument("study", type=click.Path(path_type=Path, exists=True))
@click.option("--space", default="quick", show_default=True)
@click.option("--swept", default=2048, show_default=True, help="Trees of a policy that cannot be enumerated.")
@click.option("--draft", "drafts", multiple=True, help="Compare with these drafts only.")
@click.option("--measured", "num_measured", default=0, help="Prompts of the evaluation that both trees decode.")
def main(study: Path, space: str, swept: int, drafts: tuple[str, ...], num_measured: int) -> None:
    console, trees = Console(), load_space(space)
    traces = [load_trace(path) for path in sorted(study.glob("traces/**/*.trace.json"))]
    tables = [CostTable.load(path) for path in study.glob("*.cost.json")]
    costs = max(tables, key=lambda table: table.provenance.created)
    evaluator = Evaluator(traces, costs)
    is_held = confirms(evaluator.tasks)
    choosing, held = evaluator.select(np.flatnonzero(~is_held)), evaluator.select(np.flatnonzero(is_held))
    console.say(
        f"{(~is_held).sum()} prompts choose, {is_held.sum()} are held out; plain {held.ar_ms_per_token:.2f} ms/token"
    )
    for variant in evaluator.traces:
        if drafts and variant[0] not in drafts:
            continue
        rows, ms_of, best_of = [], {}, {}
        for policy in trees.trees:
            configurations = [
                choosing.resolve(Configuration(tree=tree, draft=variant[0], subnet=variant[1]))
                for tree in trees_of(policy, trees, choosing, variant, swept)
            ]
            results = choosing.replay_many(configurations)
            best = min(range(len(results)), key=lambda row: results[row].ms_per_token)
            best_of[policy] = configurations[best]
            found = held.replay(configurations[best])
            ms_of[policy] = results[best].ms_per_token, found.ms_per_token
            rows.append(
                [
                    configurations[best].tree_label,
                    str(len(configurations)),
                    *(f"{ms:.3f}" for ms in ms_of[policy]),
                    f"{held.ar_ms_per_token / found.ms_per_token:.2f}x",
                    f"{found.tokens_per_round:.2f}",
                    f"{found.missing.sum() / found.rounds.sum():.3f}",
                ]
            )
        columns = ["tree, best where chosen", "tried", "ms/token there", "held out", "speedup", "M", "missing a round"]
        console.table(f"{variant[0]} {variant[1].label}", columns, rows)
        if "priced" in ms_of:
            rival = min((policy for policy in ms_of if policy != "priced"), key=lambda policy: ms_of[policy][0])
            gain = ms_of[rival][1] / ms_of["priced"][1] - 1
            console.say(
                f"priced is {100 * gain:+.1f} % faster on held-out prompts than {rival}, the best other where chosen"
            )
            if num_measured:
                trees_measured = {name: best_of[name] for name in ("priced", rival)}
                times = measured(study, costs, trees_measured, num_measured)
                low, high = bootstrap_ratio(times[rival], times["priced"])
                total = {name: ms.sum() for name, ms in times.items()}
                console.say(
                    f"measured on {num_measured} prompts: priced is {total[rival] / total['priced']:.3f} times as fast as {rival} "
                    f"({low:.3f}-{high:.3f}), and {total[AR] / total['priced']:.2f} times as plain decoding"
                )


if __name__ == "__main__":
    main()
