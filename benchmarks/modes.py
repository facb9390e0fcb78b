"""Runners side by side: what a plain step and a profile's decoding take eagerly, over prepared buffers, and compiled (or
captured), on the same prompts in turns.

    python benchmarks/runners.py [PROFILE] [--runner compile ...] [--prompts 8]
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import click
import numpy as np

import autotune
from autotune.device import choose_device
from autotune.documents.decoding_profile import DecodingProfile
from autotune.evaluation.summary import bootstrap_ratio
from autotune.execution import EAGER, MODES
from autotune.runtime.decoder import Decoder
from autotune.workloads.workload import load_workload


@click.command()
@click.argument("profile", type=click.Path(path_type=Path), default=Path("profiles/cpu/digits.decode.json"))
@click.option("--runner", "runners", multiple=True, type=click.Choice(list(MODES)), default=(EAGER, "fixed", "compile"))
@click.option("--prompts", default=8, show_default=True)
@click.option("--device", default="auto", show_default=True)
def main(profile: Path, runners: tuple[str, ...], prompts: int, device: str) -> None:
    workload = load_workload("digits", "evaluate", num_prompts=prompts)
    document = DecodingProfile.load(profile)
    loaded = autotune.load(document, device=choose_device(device))
    arms = {}
    for mode in runners:
        options = {"mode": mode, "threads": loaded.threads, "processor": loaded.processor}
        arms["plain", mode] = Decoder(loaded.target, **options)
        arms["tuned", mode] = Decoder(loaded.target, points=loaded.points, **options)
    ms: dict[tuple[str, str], list[float]] = {name: [] for name in arms}
    order = random.Random(0)
    for number, prompt in enumerate((*workload.prompts, *workload.prompts)):  # the first time prepares
        tokens = set()
        for name in order.sample(list(arms), len(arms)):
            for point in arms[name].points:
                point.fallback.forget()
            inputs = prompt.inputs(loaded.processor, loaded.target.device)
            began = time.monotonic()
            out = arms[name].generate(**inputs, **prompt.settings.generation, workload=prompt.settings.task)
            tokens.add(tuple(out.sequences[0].tolist()))
            if number >= len(workload.prompts):
                ms[name].append(out.stats.decode_ms / max(1, out.stats.new_tokens - 1))
            elif (took := time.monotonic() - began) > 20:
                click.echo(f"{' '.join(name)}: {took:.0f} s to prepare on {prompt.name}")
        assert len(tokens) == 1, f"{prompt.name}: answers differ"
    for point in ("plain", "tuned"):
        for mode in runners:
            mine, base = np.array(ms[point, mode]), np.array(ms[point, runners[0]])
            low, high = bootstrap_ratio(mine, base)
            click.echo(
                f"{point:6} {mode:8} {mine.mean():6.2f} ms a token, {mine.sum() / base.sum():.2f} ({low:.2f}-{high:.2f}) of "
                f"{runners[0]}'s time, {sum(ms['plain', mode]) / mine.sum():.2f}x over its own plain decoding"
            )
    for model in (
        loaded.target,
        *{id(point.draft): point.draft for point in loaded.points if point.draft is not None}.values(),
    ):
        for mode, prepared in model._graph_runners.items():
            click.echo(
                f"{prepared.description}, {mode}: {len(prepared)} forwards, {prepared.memory_bytes / 2**20:.1f} MiB"
            )


if __name__ == "__main__":
    main()
