"""Compares execution modes: time per token of plain decoding and of a profile, on the same prompts, interleaved.

The first pass over the prompts compiles or captures and is not counted. Also prints how many forward passes are captured,
and their memory. Takes about 2 minutes in ``eager`` and ``fixed``, and 10 more with ``compile``.

    python benchmarks/modes.py [PROFILE] [--mode eager --mode compile ...] [--prompts 8]
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import click
import pandas as pd

import autotune
from autotune.device import choose_device
from autotune.documents.decoding_profile import DecodingProfile
from autotune.evaluation.summary import bootstrap_ratio
from autotune.execution import EAGER, MODES
from autotune.runtime.decoder import Decoder
from autotune.workloads.workload import load_workload

REPORTED_S = 20.0  # longer compilations are reported


@click.command()
@click.argument("profile", type=click.Path(path_type=Path), default=Path("profiles/cpu/digits.decode.json"))
@click.option("--mode", "modes", multiple=True, type=click.Choice(list(MODES)), default=(EAGER, "fixed", "compile"))
@click.option("--prompts", default=8, show_default=True)
@click.option("--device", default="auto", show_default=True)
def main(profile: Path, modes: tuple[str, ...], prompts: int, device: str) -> None:
    workload = load_workload("digits", "evaluate", num_prompts=prompts)
    loaded = autotune.load(DecodingProfile.load(profile), device=choose_device(device))
    decoders = {}
    for mode in modes:
        options = {"mode": mode, "threads": loaded.threads, "processor": loaded.processor}
        decoders["plain", mode] = Decoder(loaded.target, **options)
        decoders["tuned", mode] = Decoder(loaded.target, points=loaded.points, **options)
    order, rows = random.Random(0), []
    for number, prompt in enumerate((*workload.prompts, *workload.prompts)):
        answers = set()
        for name in order.sample(list(decoders), len(decoders)):
            for point in decoders[name].points:
                point.fallback.forget()
            inputs = prompt.inputs(loaded.processor, loaded.target.device)
            started = time.monotonic()
            out = decoders[name].generate(**inputs, **prompt.settings.generation, workload=prompt.settings.task)
            seconds = time.monotonic() - started
            answers.add(tuple(out.sequences[0].tolist()))
            if number >= len(workload.prompts):
                ms = out.stats.decode_ms / max(1, out.stats.new_tokens - 1)
                rows.append({"decoding": name[0], "mode": name[1], "prompt": number, "ms": ms})
            elif seconds > REPORTED_S:
                click.echo(f"{' '.join(name)}: the first request on {prompt.name} took {seconds:.0f} s")
        assert len(answers) == 1, f"{prompt.name}: answers differ"
    ms = pd.DataFrame(rows).pivot(index="prompt", columns=["decoding", "mode"], values="ms")
    for decoding in ("plain", "tuned"):
        for mode in modes:
            own, base = ms[decoding, mode], ms[decoding, modes[0]]
            low, high = bootstrap_ratio(own.to_numpy(), base.to_numpy())
            click.echo(
                f"{decoding:6} {mode:8} {own.mean():6.2f} ms a token, {own.sum() / base.sum():.2f} ({low:.2f}-{high:.2f}) "
                f"of the time in {modes[0]} mode, {ms['plain', mode].sum() / own.sum():.2f}x over plain decoding"
            )
    drafts = {id(point.draft): point.draft for point in loaded.points if point.draft is not None}
    for model in (loaded.target, *drafts.values()):
        for mode, graphs in model._graph_runners.items():
            click.echo(f"{graphs.description}, {mode}: {len(graphs)} forwards, {graphs.memory_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
