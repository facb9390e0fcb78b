"""Replay against the runtime, over random configurations of every policy of a search space, each decoded for real.

Needs a study that `autotune search` has left behind: its cost table prices, and what it has not recorded of the subnets
drawn, any of the space, is recorded first. Prints how often rounds and accepted lengths agree, how well decoding time is
predicted and ranked (and how well one measurement ranks another, which no prediction can surpass), how much faster
replay is than decoding, and whether any of the configurations is faster than the one that a search has chosen.

    python benchmarks/predictions.py .autotune/STUDY [--profile profile.json] [--configurations 12] [--prompts 4]
"""

from __future__ import annotations

import csv
import random
import time
from collections import Counter
from pathlib import Path

import click
import numpy as np
from scipy.stats import spearmanr

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, DraftVariant, configuration_of
from autotune.documents.decoding_profile import AR, DecodingProfile
from autotune.evaluation.runs import Run
from autotune.evaluation.summary import bootstrap_ratio
from autotune.search.evaluator import Evaluator
from autotune.search.model_pool import ModelPool
from autotune.search.pipeline import bounds_of
from autotune.search.settings import SearchSettings
from autotune.search.space import SearchSpace, load_space
from autotune.search.traces import record_traces
from autotune.study.document import load_study
from autotune.workloads.workload import Workload, load_workload

NUM_TUNE = SearchSettings().num_tune_prompts
PARTS = ("draft_prefill_ms", "draft_ms", "verify_ms")  # of decoding; the rest is overhead


def places_of(
    space: SearchSpace, model_pool: ModelPool, count: int, rng: random.Random
) -> list[tuple[str, DraftVariant]]:
    """A policy and a subnet of any draft, ``count`` of every policy."""
    known = model_pool.subnets(space)
    return [(policy, rng.choice(known)) for policy in space.trees for _ in range(count)]


def drawn_from(
    space: SearchSpace, evaluator: Evaluator, variants: list[tuple[str, DraftVariant]], rng: random.Random
) -> list[Configuration]:
    """A tree for each of the places; random ones of Sequoia's trees for ``static``."""
    enough = 1 << len(variants).bit_length()  # a sweep is even over powers of two
    swept = {
        policy: space.sweep(policy, enough, rng.randrange(1 << 31)) for policy in space.trees if policy != "static"
    }
    found = []
    for policy, variant in variants:
        tree = rng.choice(evaluator.static_trees(variant, space)) if policy == "static" else swept[policy].pop(0)
        found.append(Configuration(tree=tree, draft=variant[0], subnet=variant[1]))
    return found


@click.command()
@click.argument("study", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--profile", type=click.Path(path_type=Path, exists=True), help="Of that study: is its choice the fastest?"
)
@click.option("--space", default="quick", show_default=True)
@click.option("--configurations", default=12, show_default=True, help="Of every policy.")
@click.option("--prompts", default=4, show_default=True)
@click.option("--repeats", default=1, show_default=True, help="Measurements of every prompt.")
@click.option("--seed", default=0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="CSV of every configuration.")
def main(
    study: Path,
    profile: Path | None,
    space: str,
    configurations: int,
    prompts: int,
    repeats: int,
    seed: int,
    output: Path | None,
) -> None:
    asked = load_study(study)
    assert asked is not None, "there is no study in that folder"
    model_pool = ModelPool(asked.target.id, [draft.reference.id for draft in asked.drafts], "cpu")
    tables = [CostTable.load(path) for path in sorted(study.glob("*.cost.json"))]
    table = max(tables, key=lambda found: found.provenance.created)
    tune = load_workload(asked.workload, "tune", num_prompts=NUM_TUNE)
    assert tune.sha256 == asked.tune_sha256, "the study recorded other prompts"
    chosen = Workload(tune.name, tune.split, tune.prompts[:prompts])

    rng, searched = random.Random(seed), load_space(space)
    variants = places_of(searched, model_pool, configurations, rng)
    wanted = list(dict.fromkeys(variant for _, variant in variants))
    traces = record_traces(model_pool, wanted, chosen, study, Console(), bounds=bounds_of(searched))
    evaluator = Evaluator(traces, table)
    drawn = drawn_from(searched, evaluator, variants, rng)
    runner = model_pool.runner(table.threads)
    arms = [runner.arm(f"{i}", c) for i, c in enumerate(drawn)]
    winner = None if profile is None else configuration_of(DecodingProfile.load(profile).point)
    if winner is not None:
        arms.append(runner.arm("winner", winner))
    passes = []
    for number in range(repeats):
        passes.append(
            runner.compare(
                [*arms, runner.plain],
                chosen,
                seed=seed + number,
                min_prompts=prompts,
                repeat=number,
                report=lambda done, of, n=number: print(f"pass {n + 1}: prompt {done}/{of}", flush=True),
            )
        )

    plain = [run for found in passes for run in found.pop(AR)]
    runs = {name: [run for found in passes for run in found[name]] for name in passes[0]}
    if winner is not None:
        print_regret(runs, drawn)
    same, total, incomplete = Counter[str](), Counter[str](), Counter[str]()
    errors, predicted, measured = [], [], []
    rows: list[dict[str, object]] = []
    for arm, drawn_configuration in zip(arms, drawn, strict=False):
        policy = drawn_configuration.tree["policy"]
        replayed = evaluator.replay(drawn_configuration)
        for p, run in enumerate(passes[0][arm.name]):
            total[policy] += 1
            is_same = replayed.accepted_lengths[p].tolist() == run.accepted_lengths
            same[policy] += is_same
            incomplete[policy] += bool(replayed.missing[p]) and not is_same
        predicted.append(repeats * float(replayed.decode_ms.sum()))
        measured.append(sum(run.decode_ms for run in runs[arm.name]))
        errors.append(predicted[-1] / measured[-1] - 1)
        rows.append(
            {
                "draft": drawn_configuration.draft,
                "subnet": drawn_configuration.subnet.name,
                "tree": drawn_configuration.tree,
                "rounds": int(replayed.rounds.sum()),
                "draft_forwards": int(replayed.draft_forwards.sum()),
                "verified_nodes": int(replayed.verified_nodes.sum()),
                "predicted_decode_ms": predicted[-1] / repeats,
                **{f"predicted_{part}": float(getattr(replayed, part).sum()) for part in PARTS},
                **{
                    f"measured_{part}_{number}": sum(getattr(run, part) for run in found[arm.name])
                    for number, found in enumerate(passes, 1)
                    for part in ("decode_ms", *PARTS)
                },
            }
        )
    if output is not None:
        with output.open("w", newline="") as file:
            table_of_all = csv.DictWriter(file, list(rows[0]))
            table_of_all.writeheader()
            table_of_all.writerows(rows)
    for policy in total:
        print(
            f"{policy}: rounds and accepted lengths equal on {same[policy]} of {total[policy]} "
            f"(of the others the trace lacks a node that was asked for on {incomplete[policy]})"
        )
    print_errors("predicted decoding time", errors)
    # The machine is not always as fast as when its table was measured; with and without a draft alike.
    speed = sum(run.decode_ms for run in plain) / (repeats * float(evaluator.ar_ms.sum()))
    print(f"plain decoding takes {speed:.2f} of the time that the table says")
    print_errors("predicted speedup", [(1 + error) * speed - 1 for error in errors])
    ranked = spearmanr(predicted, measured).statistic
    spread = np.quantile(measured, 0.9) / np.quantile(measured, 0.1)
    print(
        f"Spearman's rank correlation {ranked:.3f}; the middle eight tenths of the configurations lie within a factor of {spread:.2f}"
    )
    if repeats > 1:
        halves = [[sum(run.decode_ms for run in one[arm.name]) for arm in arms[: len(drawn)]] for one in passes]
        again = spearmanr(halves[0], halves[1]).statistic
        print(f"of the first pass with the second {again:.3f}")

    started = time.perf_counter()
    for drawn_configuration in drawn:
        evaluator.replay(drawn_configuration)
    replay_s = (time.perf_counter() - started) / len(drawn)
    decode_s = float(np.mean(measured)) / 1e3 / repeats
    print(
        f"replay: {1e3 * replay_s:.2f} ms a configuration, decoding: {decode_s:.1f} s; {decode_s / replay_s:,.0f} times faster"
    )


def print_errors(name: str, errors: list[float]) -> None:
    """Their size, and their sign."""
    size = 100 * np.abs(errors)
    print(
        f"{name}: median error {np.median(size):.1f} %, 90th percentile {np.quantile(size, 0.9):.1f} %; "
        f"signed {100 * np.min(errors):+.1f} % to {100 * np.max(errors):+.1f} %, median {100 * np.median(errors):+.1f} %"
    )


def print_regret(runs: dict[str, list[Run]], drawn: list[Configuration]) -> None:
    """How many of the configurations are faster than the winner, by how much."""
    winner_ms = np.array([run.decode_ms for run in runs["winner"]])
    ratios = {
        name: np.array([run.decode_ms for run in found]) / winner_ms for name, found in runs.items() if name != "winner"
    }
    totals = {name: sum(run.decode_ms for run in runs[name]) / winner_ms.sum() for name in ratios}
    surely = [
        name for name in ratios if bootstrap_ratio(np.array([run.decode_ms for run in runs[name]]), winner_ms)[1] < 0.98
    ]
    best = min(totals, key=lambda name: totals[name])
    print(
        f"regret: of {len(ratios)} configurations {sum(total < 1 for total in totals.values())} took less time than the winner, "
        f"{len(surely)} of them by more than 2 % with their interval; the fastest took {totals[best]:.3f} of it: {drawn[int(best)].label}"
    )


if __name__ == "__main__":
    main()
