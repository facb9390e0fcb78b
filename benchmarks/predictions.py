"""Replay against the runtime, over random configurations of every policy of a search space, each decoded for real.

Needs a study that `autotune search` has left behind. Prints how often rounds and accepted lengths agree, how well
decoding time is predicted and ranked, how much faster replay is than decoding, and whether any of the configurations is
faster than the one that a search has chosen.

    python benchmarks/predictions.py .autotune/STUDY [--profile profile.json] [--configurations 12] [--prompts 4]
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
from autotune.cost.table import load_table
from autotune.decoding_profile import load_profile
from autotune.search.bootstrap import bootstrap_ratio
from autotune.search.contenders import Contenders
from autotune.search.evaluator import Evaluator
from autotune.search.finalists import AR, Arm, Run
from autotune.search.space import Configuration, SearchSpace, configuration_of, load_space
from autotune.workload import Workload, load_workload


def drawn_from(space: SearchSpace, evaluator: Evaluator, count: int, rng: random.Random) -> list[Configuration]:
    """Configurations spread over policies, drafts, subnets and trees; random ones of Sequoia's trees for ``static``."""
    found = []
    for policy in space.trees:
        places = [rng.choice(list(evaluator.traces)) for _ in range(count)]
        if policy == "static":
            planned = {place: evaluator.static_trees(place, space) for place in dict.fromkeys(places)}
            trees = [rng.choice(planned[place]) for place in places]
        else:
            trees = space.sweep(policy, count, rng.randrange(1 << 31))
        found += [Configuration(tree=t, draft=draft, subnet=s) for (draft, s), t in zip(places, trees, strict=True)]
    return found


@click.command()
@click.argument("study", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--profile", type=click.Path(path_type=Path, exists=True), help="Of that study: is its choice the fastest?"
)
@click.option("--space", default="quick", show_default=True)
@click.option("--configurations", default=12, show_default=True, help="Of every policy.")
@click.option("--prompts", default=4, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(study: Path, profile: Path | None, space: str, configurations: int, prompts: int, seed: int) -> None:
    traces = [load_trace(path) for path in sorted((study / "traces").glob("*/*.trace.json"))]
    drafts = list(dict.fromkeys(trace.header.draft.id for trace in traces))
    contenders = Contenders(traces[0].header.target.id, drafts, "cpu")
    tables = [load_table(path) for path in sorted(study.glob("*.cost.json"))]
    table = max(tables, key=lambda found: found.provenance.created)
    evaluator = Evaluator(traces, table)
    tune = load_workload("digits", "tune", num_prompts=traces[0].num_prompts)
    assert tune.sha256 == traces[0].header.workload_sha256, "the study recorded other prompts"
    chosen = Workload(tune.name, tune.split, tune.prompts[:prompts])

    drawn = drawn_from(load_space(space), evaluator, configurations, random.Random(seed))
    arms = [Arm(f"{i}", c) for i, c in enumerate(drawn)]
    winner = None if profile is None else configuration_of(load_profile(profile).point)
    if winner is not None:
        arms.append(Arm("winner", winner))
    runs = contenders.runner(table.threads).compare(
        [*arms, Arm(AR)], chosen, seed=seed, report=lambda done, of: print(f"prompt {done}/{of}", flush=True)
    )

    plain = runs.pop(AR)
    if winner is not None:
        print_regret(runs, {arm.name: arm for arm in arms})
    same, total, incomplete = Counter[str](), Counter[str](), Counter[str]()
    errors, predicted, measured = [], [], []
    for arm, drawn_configuration in zip(arms, drawn, strict=False):
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
    print_errors("predicted decoding time", errors)
    # The machine is not always as fast as when its table was measured; with and without a draft alike.
    speed = sum(run.decode_ms for run in plain) / float(evaluator.ar_ms[: len(plain)].sum())
    print(f"plain decoding takes {speed:.2f} of the time that the table says")
    print_errors("predicted speedup", [(1 + error) * speed - 1 for error in errors])
    print(f"Spearman's rank correlation {spearmanr(predicted, measured).statistic:.3f}")

    started = time.perf_counter()
    for drawn_configuration in drawn:
        evaluator.replay(drawn_configuration)
    replay_s = (time.perf_counter() - started) / len(drawn)
    decode_s = float(np.mean(measured)) / 1e3 * len(tune.prompts) / len(chosen.prompts)
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


def print_regret(runs: dict[str, list[Run]], arms: dict[str, Arm]) -> None:
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
    c = arms[best].configuration
    print(
        f"regret: of {len(ratios)} configurations {sum(total < 1 for total in totals.values())} took less time than the winner, "
        f"{len(surely)} of them by more than 2 % with their interval; the fastest took {totals[best]:.3f} of it: {c and c.label}"
    )


if __name__ == "__main__":
    main()
