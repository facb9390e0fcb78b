"""Predicted against measured speedups of many settings of a serving engine, in turns on held-out prompts, and the
regret of the search's choice.

    python benchmarks/engine_arms.py profile.json WORKLOAD --settings 40 --record arms.jsonl

    python benchmarks/engine_arms.py profile.json WORKLOAD --requests-at-once 4 --requests-at-once 16

The profile is one of ``autotune search --engine``. Its recommended settings, the fastest of each type by replay, its
default, no speculation, and settings drawn at random answer the held-out prompts of the workload, each in a server of
its own, all at once: a server needs memory for its KV cache. Prompts that the record holds are not served again.
Predictions are of the profile's prices and a replay of these prompts, which set no price. The regret is how much faster
the fastest of all settings is than the recommended ones. Takes about 10 minutes for 40 settings of a model of 135M
parameters.

With --requests-at-once, no speculation and the recommended settings of vLLM with 1 to 8 draft tokens serve so many
requests at a time, one server after the other.
"""

from __future__ import annotations

import random
from pathlib import Path

import click
import numpy as np
from scipy.stats import spearmanr

from autotune.console import Console
from autotune.documents.engine_profile import TYPES, EngineProfile, Speculation
from autotune.engines.engine_runs import OFF, confirm, measure_loads, serve_in_turns
from autotune.engines.engine_search import ENGINES, speculation_space
from autotune.engines.engine_use import engine_of
from autotune.engines.verification_prices import prices_of
from autotune.workloads.workload import load_workload

LENGTH = "num_speculative_tokens"


@click.command(help=__doc__)
@click.argument("profile", type=click.Path(exists=True, path_type=Path))
@click.argument("workload")
@click.option("--settings", "count", default=40, show_default=True, help="Settings drawn at random.")
@click.option("--prompts", default=12, show_default=True)
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--engine-command", default=None)
@click.option("--requests-at-once", type=int, multiple=True)
@click.option("--record", type=click.Path(path_type=Path), default=Path("arms.jsonl"), show_default=True)
def main(
    profile: Path,
    workload: str,
    count: int,
    prompts: int,
    max_new_tokens: int,
    seed: int,
    engine_command: str | None,
    requests_at_once: tuple[int, ...],
    record: Path,
) -> None:
    found = EngineProfile.load(profile)
    kind = ENGINES[found.engine]
    types = [name for name in TYPES[found.engine] if name not in found.left_out]
    drawn = random.Random(seed).sample(speculation_space(kind, types), count)
    fastest = [one.speculation for one in found.fastest]
    chosen = [found.speculation] if found.speculation else []
    arms: dict[str, list[Speculation]] = {OFF: []}
    arms |= {one.label: [one] for one in (*chosen, *fastest, *drawn)}
    held_out = load_workload(workload, "evaluate").first_turns().cut(prompts, max_new_tokens).prompts
    console, engine = Console(), engine_of(found, engine_command)
    if requests_at_once:
        lengths = [
            found.checked.model_copy(update={"options": found.checked.options | {LENGTH: k}}) for k in range(1, 9)
        ]
        plain = serve_in_turns(engine, {OFF: []}, held_out, "plain answers", console)[OFF].answers
        arms = {OFF: [], **{one.label: [one] for one in lengths}}
        for size in requests_at_once:
            measure_loads(engine, arms, plain, size, console)
        return
    measured, _ = confirm(engine, arms, held_out, prices_of(found), console, seed=seed, record=record)
    ratios = np.array([arm.predicted / arm.measured for arm in measured[1:]])
    errors = 100 * np.abs(ratios - 1)
    random_ones = {one.label for one in drawn}
    for name, rows in (
        ("all settings", measured[1:]),
        ("drawn at random", [arm for arm in measured[1:] if arm.label in random_ones]),
    ):
        predicted, speeds, tokens = (
            np.array([getattr(arm, one) for arm in rows]) for one in ("predicted", "measured", "tokens_per_step")
        )
        part = 100 * np.abs(predicted / speeds - 1)
        print(
            f"{name}: {len(rows)}, {speeds.min():.2f}x to {speeds.max():.2f}x; rank correlation (Spearman) of predictions {spearmanr(predicted, speeds)[0]:.2f}, "
            f"of tokens per step {spearmanr(tokens, speeds)[0]:.2f}; error: median {np.median(part):.1f} %, largest {part.max():.1f} %"
        )
    best = max(measured, key=lambda arm: arm.measured)
    label = found.speculation.label if found.speculation else OFF
    own = next(arm for arm in measured if arm.label == label)
    print(
        f"recommended: {label} {own.measured:.3f}x; fastest: {best.label} {best.measured:.3f}x; regret {100 * (best.measured / own.measured - 1):.1f} %; "
        f"predictions above what was measured: {int((ratios > 1).sum())} of {len(errors)}"
    )
    print(
        f"requests with the replay's counts: {sum(arm.exact or 0 for arm in measured)} of {sum(arm.prompts for arm in measured)}"
    )


if __name__ == "__main__":
    main()
