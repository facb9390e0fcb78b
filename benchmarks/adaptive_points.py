"""Compares points chosen online with labelled points and with one common point, in replay.

Trees of each draft of a study are drawn from a search space. On two thirds of the prompts, the fastest tree is chosen for all
tasks (the common point) and for each task (labelled points). The other prompts are then replayed with the common point, with
labelled points, and with the choice online among all of them, which begins at the common point and knows no task; each third of
the prompts is left out once. Rounds are priced by the study's cost table. Needs no model; takes about a minute for 48 prompts.

    python benchmarks/adaptive_points.py .autotune/STUDY [--trees 40] [--space quick]
"""

from __future__ import annotations

import itertools
import random
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

from autotune.acceptance.online_choice import OnlineChoice
from autotune.acceptance.replay import _level_price, _price, replay
from autotune.acceptance.rounds import Round, adaptive_rounds
from autotune.acceptance.trace import Trace, load_trace
from autotune.cost.table import CostTable, DensePrices
from autotune.documents.configuration import Configuration
from autotune.search.evaluator import Evaluator
from autotune.search.space import load_space
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import POLICIES, Policy, parse_policy

NUM_PARTS = 3


class TimedChoice(OnlineChoice):
    """Adds up the time that the choice takes."""

    seconds = 0.0

    def end_round(self, *args: Any) -> None:
        started = time.perf_counter()
        super().end_round(*args)
        self.seconds += time.perf_counter() - started

    def choose(self, eligible: Collection[int]) -> int:
        started = time.perf_counter()
        number = super().choose(eligible)
        self.seconds += time.perf_counter() - started
        return number


def decode_ms(trace: Trace, prices: DensePrices, prompt: int, decoded: list[Round]) -> float:
    """Predicted time of a prompt's rounds, as in ``replay``."""
    prompt_length = trace.draft_prompt_length[prompt : prompt + 1]
    has_image = trace.num_visual_tokens[prompt : prompt + 1] > 0
    ms = float(prices.draft_prefill.ms(prompt_length, has_image)[0])
    draft_length, pending = int(trace.draft_kv_length(prices.crossing_share)[prompt]), 1
    for one in decoded:
        if one.tree is None:
            ms += float(prices.decode_ms[min(one.context_tokens // prices.kv_step, len(prices.decode_ms) - 1)])
            pending += 1
            continue
        num_read = 0
        if one.widths:
            ms += _price(prices.draft_first_ms, pending, draft_length, prices.kv_step)
            draft_length, pending = draft_length + pending, 0
        for width in one.widths[1:]:
            ms += _level_price(prices.draft_level_ms, width, draft_length + num_read, prices.kv_step)
            num_read += width
        ms += _price(prices.verify_ms, one.num_nodes + 1, one.context_tokens, prices.kv_step)
        ms += prices.overhead_round_ms + prices.overhead_level_ms * one.num_levels
        ms += prices.overhead_node_ms * one.num_nodes
        is_read = one.tree.row[one.path] >= 0
        num_kept = 0 if trace.header.rereads_accepted else int(is_read.sum())
        draft_length += num_kept
        pending += len(one.path) - num_kept + 1
    return ms


def drawn_trees(evaluator: Evaluator, space_name: str, count: int, policies: Collection[str]) -> list[Configuration]:
    """Trees of every policy of a space, for the evaluator's only draft variant."""
    space, ((draft, subnet),) = load_space(space_name), evaluator.traces
    rng = random.Random(0)
    trees = [
        tree
        for name in policies
        if name in space.trees and not POLICIES[name].is_template()
        for tree in space.sweep(name, count, rng.randrange(1 << 31))
    ]
    trees += [{"policy": "chain", "depth": depth} for depth in range(1, 11)]
    return [evaluator.resolve(Configuration(draft=draft, subnet=subnet, tree=tree)) for tree in trees]


def held_out_rows(evaluator: Evaluator, configurations: list[Configuration], part: int) -> list[dict[str, object]]:
    """Times of the prompts of one part, with points chosen on the others."""
    ((trace),), (prices,) = evaluator.traces.values(), evaluator.prices.values()
    index, tasks = np.arange(trace.num_prompts), np.array(evaluator.tasks)
    tuning, held_out = index[index % NUM_PARTS != part], index[index % NUM_PARTS == part]
    chosen = evaluator.select(tuning)
    ms = np.array([replay(trace, parse_policy(one.tree), prices, prompts=tuning).decode_ms for one in configurations])
    best = {task: int(ms[:, tuning[tasks[tuning] == task]].sum(1).argmin()) for task in sorted(set(tasks[tuning]))}
    common = int(ms[:, tuning].sum(1).argmin())
    points: dict[int, tuple[Policy, RoundPrice]] = {}
    for number in dict.fromkeys([common, *best.values()]):
        points[number] = (parse_policy(configurations[number].tree), chosen.round_price(configurations[number]))
    fixed = {n: replay(trace, policy, prices, price, prompts=held_out) for n, (policy, price) in points.items()}
    rows: list[dict[str, object]] = []
    for prompt in held_out.tolist():
        choice = TimedChoice(points)
        decoded = list(adaptive_rounds(trace, prompt, points, choice))
        adaptive = decode_ms(trace, prices, prompt, [one for _, one in decoded])
        labelled = best.get(str(tasks[prompt]), common)
        rows.append(
            {
                "task": tasks[prompt],
                "tokens": fixed[common].tokens[prompt],
                "common": fixed[common].decode_ms[prompt],
                "labelled": fixed[labelled].decode_ms[prompt],
                "online": adaptive,
                "best point": min(found.decode_ms[prompt] for found in fixed.values()),
                "points": len(points),
                "rounds": len(decoded),
                "choice": 1e3 * choice.seconds,
                "switches": sum(a != b for (a, _), (b, _) in itertools.pairwise(decoded)),
            }
        )
    return rows


@click.command()
@click.argument("study", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--trees", default=40, show_default=True, help="Trees drawn of each policy.")
@click.option("--space", default="quick", show_default=True)
@click.option("--policy", "policies", multiple=True, default=list(POLICIES), help="Tree policies; all by default.")
def main(study: Path, trees: int, space: str, policies: tuple[str, ...]) -> None:
    warnings.filterwarnings("ignore", message="The balance properties of Sobol")
    table = CostTable.load(next(study.glob("*.cost.json")))
    for path in sorted(study.glob("traces/*/*.trace.json")):
        trace = load_trace(path)
        if trace.header.draft.id == "retrieval":
            continue
        evaluator = Evaluator([trace], table)
        configurations = drawn_trees(evaluator, space, trees, policies)
        rows = [row for part in range(NUM_PARTS) for row in held_out_rows(evaluator, configurations, part)]
        frame = pd.DataFrame(rows)
        pooled = frame[["common", "labelled", "online", "best point"]].sum() / frame["tokens"].sum()
        click.echo(f"\n{trace.header.draft.id} {trace.header.subnet.label}, ms per token on held-out prompts")
        spent = frame["choice"].sum()
        click.echo(pooled.round(3).to_string())
        click.echo(
            f"online over labelled {pooled['online'] / pooled['labelled']:.3f}, over common "
            f"{pooled['online'] / pooled['common']:.3f}; {frame['points'].mean():.1f} points, "
            f"{frame['switches'].mean():.1f} switches a prompt; choosing takes {1e3 * spent / frame['rounds'].sum():.0f} us "
            f"a round, {100 * spent / frame['online'].sum():.1f} % of the predicted time"
        )


if __name__ == "__main__":
    main()
