"""Compares replay with the runtime on random configurations of every policy of a search space.

Needs a study folder of ``autotune search``: its cost table is used, and missing traces are recorded first. Prints how
often rounds and accepted lengths agree; the errors of predicted decoding times and speedups; their rank correlation
with measured times, beside that of one measurement with another; how much faster replay is than decoding; and, with
``--profile``, how many of the configurations, and of the ten that replay ranks next to it, are faster than the one that
the search chose. Takes about 15 minutes.

    python benchmarks/predictions.py .autotune/STUDY [--profile profile.json] [--configurations 12] [--prompts 4]
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import click
import numpy as np
import pandas as pd

from autotune.cli.options import TABLE_FILE
from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, DraftVariant, configuration_of
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, DecodingProfile
from autotune.documents.search_space import SearchSpace
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runtime_arms import arms_of_pool
from autotune.evaluation.summary import bootstrap_ratio
from autotune.files import write_table
from autotune.recording.traces import record_traces
from autotune.replay.evaluator import Evaluator
from autotune.runtime.model_pool import ModelPool, variants_of
from autotune.study.document import load_study, newest_profile
from autotune.study.search_settings import SearchSettings
from autotune.study.spaces import bounds_of, load_space
from autotune.trees.policy import POLICIES
from autotune.workloads.workload import Workload, load_workload

NEXT_BEST, SWEPT = 10, 9  # trees beside the winner; log2 of the trees of a policy among which they are
PARTS = ("draft_prefill_ms", "draft_ms", "verify_ms")  # of decode_ms; the rest is overhead


def random_variants(
    space: SearchSpace, model_pool: ModelPool, count: int, rng: random.Random
) -> list[tuple[str, DraftVariant]]:
    """``count`` pairs of policy and draft variant for every policy."""
    variants = variants_of(model_pool, space)
    return [(policy, rng.choice(variants)) for policy in space.trees for _ in range(count)]


def random_configurations(
    space: SearchSpace, evaluator: Evaluator, pairs: list[tuple[str, DraftVariant]], rng: random.Random
) -> list[Configuration]:
    """A tree for each pair of policy and variant; for ``static`` a random one of Sequoia's trees."""
    sweep_size = 1 << len(pairs).bit_length()  # a sweep is even over powers of two
    swept = {
        policy: space.sweep(policy, sweep_size, rng.randrange(1 << 31))
        for policy in space.trees
        if not POLICIES[policy].template_sizes
    }
    configurations = []
    for policy, variant in pairs:
        tree = (
            swept[policy].pop(0)
            if policy in swept
            else rng.choice(evaluator.template_trees(variant, space.values(policy)))
        )
        configurations.append(Configuration(tree=tree, draft=variant[0], subnet=variant[1]))
    return configurations


def next_best(
    space: SearchSpace, evaluator: Evaluator, winner: Configuration, count: int, rng: random.Random
) -> list[Configuration]:
    """The trees for the winner's subnet that replay ranks highest among hundreds of every policy, without the
    winner's.
    """
    assert winner.draft is not None
    variant = (winner.draft, winner.subnet)
    trees = [
        tree
        for policy in space.trees
        for tree in (
            evaluator.template_trees(variant, space.values(policy))
            if POLICIES[policy].template_sizes
            else space.sweep(policy, 1 << SWEPT, rng.randrange(1 << 31))
        )
        if tree != winner.tree
    ]
    found = (Configuration(tree=tree, draft=variant[0], subnet=variant[1]) for tree in trees)
    by_key = {one.key: one for one in found}
    return sorted(by_key.values(), key=lambda one: float(evaluator.replay(one).decode_ms.sum()))[:count]


def compare_with_replay(
    configuration: Configuration, evaluator: Evaluator, passes: list[list[Decoded]]
) -> dict[str, object]:
    """Predicted and measured figures of a configuration, summed over prompts."""
    replayed = evaluator.replay(configuration)
    is_same = [replayed.accepted_lengths[p].tolist() == run.accepted_lengths for p, run in enumerate(passes[0])]
    return {
        "draft": configuration.draft,
        "subnet": configuration.subnet.name,
        "policy": configuration.tree["policy"],
        "tree": configuration.tree,
        "num_prompts": len(is_same),
        "num_same": sum(is_same),
        "num_incomplete": int(np.count_nonzero(replayed.missing.astype(bool) & ~np.array(is_same))),
        "rounds": int(replayed.rounds.sum()),
        "draft_forwards": int(replayed.draft_forwards.sum()),
        "verified_nodes": int(replayed.verified_nodes.sum()),
        "predicted_decode_ms": float(replayed.decode_ms.sum()),
        **{f"predicted_{part}": float(getattr(replayed, part).sum()) for part in PARTS},
        **{
            f"measured_{part}_{number}": sum(getattr(run, part) for run in runs)
            for number, runs in enumerate(passes, 1)
            for part in ("decode_ms", *PARTS)
        },
    }


@click.command()
@click.argument("study", type=click.Path(path_type=Path, exists=True))
@click.option("--profile", type=click.Path(path_type=Path, exists=True), help="Profile that the search wrote.")
@click.option("--space", default="quick", show_default=True)
@click.option("--configurations", default=12, show_default=True, help="Of every policy.")
@click.option("--prompts", default=4, show_default=True)
@click.option("--repeats", default=1, show_default=True, help="Measurements of every prompt.")
@click.option("--seed", default=0, show_default=True)
@click.option("--table", type=TABLE_FILE, help="Write a row for every configuration to a .csv or .parquet file.")
def main(
    study: Path,
    profile: Path | None,
    space: str,
    configurations: int,
    prompts: int,
    repeats: int,
    seed: int,
    table: Path | None,
) -> None:
    document = load_study(study)
    assert document is not None, "the folder holds no study"
    model_pool = ModelPool(document.target.id, [draft.reference.id for draft in document.drafts], "cpu")
    costs = max(
        (CostTable.load(path) for path in study.glob("*.cost.json")), key=lambda costs: costs.provenance.created
    )
    tune = load_workload(document.workload, "tune", num_prompts=SearchSettings.model_fields["num_tune_prompts"].default)
    if path := newest_profile(study):  # a search that its budget cut recorded fewer prompts, or shorter answers
        recorded = DecodingProfile.load(path).workload
        tune = tune.cut(recorded.num_tune_prompts, recorded.max_new_tokens)
    assert tune.sha256 == document.tune_sha256, "the study recorded other prompts"
    chosen = Workload(tune.name, tune.split, tune.prompts[:prompts])

    rng, searched = random.Random(seed), load_space(space)
    pairs = random_variants(searched, model_pool, configurations, rng)
    winner = None if profile is None else configuration_of(DecodingProfile.load(profile).point)
    variants = list(dict.fromkeys(variant for _, variant in pairs))
    if winner is not None and winner.draft is not None:
        variants = list(dict.fromkeys([*variants, (winner.draft, winner.subnet)]))
    traces = record_traces(model_pool, variants, chosen, study, Console(), bounds=bounds_of(searched))
    evaluator = Evaluator(traces, costs)
    drawn = random_configurations(searched, evaluator, pairs, rng)
    if winner is not None:
        drawn += next_best(searched, evaluator, winner, NEXT_BEST, rng)
    runtime = arms_of_pool(model_pool, costs)
    arms = [runtime.plain, *(runtime.arm(f"{number}", configuration) for number, configuration in enumerate(drawn))]
    if winner is not None:
        arms.append(runtime.arm("winner", winner))
    passes = [
        race(
            runtime.runner(),
            arms,
            chosen.prompts,
            Everyone(),
            seed=seed + number,
            report=lambda done, of, n=number: print(f"pass {n + 1}: prompt {done}/{of}", flush=True),
        ).runs
        for number in range(repeats)
    ]

    frame = pd.DataFrame(
        compare_with_replay(configuration, evaluator, [runs[f"{number}"] for runs in passes])
        for number, configuration in enumerate(drawn)
    )
    for policy, counts in (
        frame.groupby("policy", sort=False)[["num_same", "num_prompts", "num_incomplete"]].sum().iterrows()
    ):
        print(
            f"{policy}: rounds and accepted lengths equal on {counts.num_same} of {counts.num_prompts} "
            f"(on {counts.num_incomplete} of the others the trace lacks a node)"
        )
    measured = frame[[f"measured_decode_ms_{number}" for number in range(1, repeats + 1)]]
    errors = frame.predicted_decode_ms / measured.mean(axis=1) - 1
    print_errors("predicted decoding time", errors)
    # The machine may be slower than when its table was measured, with and without a draft alike.
    plain_ms = sum(run.decode_ms for runs in passes for run in runs[AR])
    slowdown = plain_ms / (repeats * float(evaluator.ar_ms.sum()))
    if table is not None:
        speedups = {
            "predicted_speedup": float(evaluator.ar_ms.sum()) / frame.predicted_decode_ms,
            "measured_speedup": plain_ms / repeats / measured.mean(axis=1),
        }
        write_table(table, frame.assign(tree=frame.tree.astype(str), **speedups))
    print(f"plain decoding takes {slowdown:.2f} of the time in the cost table")
    print_errors("predicted speedup", (1 + errors) * slowdown - 1)
    ranked = frame.predicted_decode_ms.corr(measured.mean(axis=1), method="spearman")
    low, high = measured.mean(axis=1).quantile([0.1, 0.9])
    print(
        f"Spearman's rank correlation {ranked:.3f}; 80 % of the configurations lie within a factor of {high / low:.2f}"
    )
    if repeats > 1:
        print(
            f"rank correlation of the first two passes {measured.iloc[:, 0].corr(measured.iloc[:, 1], 'spearman'):.3f}"
        )
    if winner is not None:
        print_regret(passes, drawn)

    started = time.perf_counter()
    for configuration in drawn:
        evaluator.replay(configuration)
    replay_s = (time.perf_counter() - started) / len(drawn)
    decode_s = float(measured.to_numpy().mean()) / 1e3
    print(
        f"replay: {1e3 * replay_s:.2f} ms a configuration, decoding: {decode_s:.1f} s; "
        f"{decode_s / replay_s:,.0f} times faster"
    )


def print_errors(name: str, errors: pd.Series[float]) -> None:
    size, errors = 100 * errors.abs(), 100 * errors
    print(
        f"{name}: median error {size.median():.1f} %, 90th percentile {size.quantile(0.9):.1f} %; "
        f"signed {errors.min():+.1f} % to {errors.max():+.1f} %, median {errors.median():+.1f} %"
    )


def print_regret(passes: list[dict[str, list[Decoded]]], drawn: list[Configuration]) -> None:
    """Print how many of the configurations are faster than the winner, and by how much."""
    ms = pd.DataFrame({name: [run.decode_ms for runs in passes for run in runs[name]] for name in passes[0]})
    ms, winner_ms = ms.drop(columns=[AR, "winner"]), ms.winner.to_numpy()
    shares = ms.sum() / winner_ms.sum()
    faster = [name for name in ms if bootstrap_ratio(ms[name].to_numpy(), winner_ms)[1] < 0.98]
    best = str(shares.idxmin())
    print(
        f"regret: {(shares < 1).sum()} of {len(shares)} configurations took less time than the winner, {len(faster)} of "
        f"them significantly by more than 2 %; the fastest took {shares.min():.3f} of it: {drawn[int(best)].label}"
    )


if __name__ == "__main__":
    main()
