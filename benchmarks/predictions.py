"""Replay against the runtime, over random configurations of every policy of a search space, each decoded for real.

Needs a study that `autotune search` has left behind. Prints how often rounds and accepted lengths agree, how well
decoding time is predicted and ranked, and how much faster replay is than decoding.

    python benchmarks/predictions.py .autotune/STUDY [--configurations 50] [--prompts 4]
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import click
import numpy as np
from scipy.stats import spearmanr

from autotune.acceptance.trace import load_trace
from autotune.models import BUNDLED_DRAFT, BUNDLED_TARGET
from autotune.search.documents import load_table
from autotune.search.finalists import Arm, Runner
from autotune.search.pair import Pair
from autotune.search.space import Configuration, SearchSpace, load_space
from autotune.search.study import Evaluator
from autotune.workload import Workload, load_workload


def drawn_from(
    space: SearchSpace, policy: str, evaluator: Evaluator, count: int, rng: random.Random
) -> list[Configuration]:
    """Configurations spread over the space; random ones of Sequoia's trees for ``static``."""
    if policy == "static":
        return rng.sample(evaluator.static_trees(space.trees[policy]), count)
    return [found for found, _ in space.sweep(policy, count, rng.randrange(1 << 31))]


@click.command()
@click.argument("study", type=click.Path(path_type=Path, exists=True))
@click.option("--space", default="quick", show_default=True)
@click.option("--configurations", default=50, show_default=True, help="Of every policy.")
@click.option("--prompts", default=4, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(study: Path, space: str, configurations: int, prompts: int, seed: int) -> None:
    pair = Pair(BUNDLED_TARGET, BUNDLED_DRAFT, "cpu")
    traces = [load_trace(path) for path in sorted((study / "traces").glob("*.trace.json"))]
    table = load_table(next(iter(sorted(study.glob("*.cost.json")))))
    evaluator = Evaluator(traces, table, pair.draft_reference)
    tune = load_workload("digits", "tune", num_prompts=48)
    assert tune.sha256 == traces[0].header.workload_sha256, "the study recorded other prompts"
    chosen = Workload(tune.name, tune.split, tune.prompts[:prompts])

    rng = random.Random(seed)
    searched = load_space(space)
    drawn = [c for policy in searched.trees for c in drawn_from(searched, policy, evaluator, configurations, rng)]
    arms = [Arm(f"{i}", c) for i, c in enumerate(drawn)]
    runs = Runner(pair.decoder, pair.processor).compare(
        arms, chosen, seed=seed, report=lambda done, of: print(f"prompt {done}/{of}", flush=True)
    )

    same, total, incomplete = Counter[str](), Counter[str](), Counter[str]()
    errors, predicted, measured = [], [], []
    for arm, drawn_configuration in zip(arms, drawn, strict=True):
        policy = drawn_configuration.tree["policy"]
        replayed = evaluator.replay(drawn_configuration)
        for p, run in enumerate(runs[arm.name]):
            total[policy] += 1
            is_same = replayed.accepted_lengths[p].tolist() == run.accepted_lengths
            same[policy] += is_same
            incomplete[policy] += bool(replayed.missing[p]) and not is_same
        predicted.append(float(replayed.decode_ms[: len(runs[arm.name])].sum()))
        measured.append(sum(run.decode_ms for run in runs[arm.name]))
        errors.append(predicted[-1] / measured[-1] - 1)
    for policy in total:
        print(
            f"{policy}: rounds and accepted lengths equal on {same[policy]} of {total[policy]} "
            f"(of the others the trace lacks a node that was asked for on {incomplete[policy]})"
        )
    size = np.abs(errors)
    print(
        f"predicted decoding time: median error {100 * np.median(size):.1f} %, 90th percentile {100 * np.quantile(size, 0.9):.1f} %"
    )
    print(
        f"signed: {100 * np.min(errors):+.1f} % to {100 * np.max(errors):+.1f} %, median {100 * np.median(errors):+.1f} %"
    )
    print(f"Spearman's rank correlation {spearmanr(predicted, measured).statistic:.3f}")

    started = time.perf_counter()
    for drawn_configuration in drawn:
        evaluator.replay(drawn_configuration)
    replay_s = (time.perf_counter() - started) / len(drawn)
    decode_s = float(np.mean(measured)) / 1e3 * len(tune.prompts) / len(chosen.prompts)
    print(
        f"replay: {1e3 * replay_s:.2f} ms a configuration, decoding: {decode_s:.1f} s; {decode_s / replay_s:,.0f} times faster"
    )


if __name__ == "__main__":
    main()
