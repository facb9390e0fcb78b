"""Decodes held-out prompts with several profiles in turns, and compares their times with those of the first one.

Checks that all answers equal plain decoding's. Drafts are those that the profiles name. Takes about 4 minutes for 64 prompts and three profiles.

    python benchmarks/profiles.py FIRST.json OTHER.json ... [--prompts 64] [--repeats 2]
"""

from __future__ import annotations

import random
from pathlib import Path

import click
import numpy as np
import torch

import autotune
from autotune.console import Console
from autotune.documents.decoding_profile import AR, DecodingProfile
from autotune.evaluation.summary import bootstrap_ratio
from autotune.modeling.loading import load_model, load_processor
from autotune.workloads.workload import load_workload


@click.command()
@click.argument("profiles", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--prompts", default=64, show_default=True)
@click.option("--repeats", default=2, show_default=True)
def main(profiles: tuple[Path, ...], prompts: int, repeats: int) -> None:
    console, first = Console(), DecodingProfile.load(profiles[0])
    model, processor = load_model(first.target.id), load_processor(first.target.id)
    torch.set_num_threads(first.threads or torch.get_num_threads())
    decoders = {str(path): autotune.load(path, target=model) for path in profiles}
    decoders[AR] = autotune.Decoder(target=model, draft=None, processor=processor)
    order = random.Random(0)
    workload = load_workload(first.workload.name, "evaluate", num_prompts=prompts)
    for decoder in decoders.values():  # warm up
        decoder.generate(**workload.prompts[0].inputs(processor), **workload.prompts[0].settings.generation)
    ms: dict[str, list[float]] = {name: [] for name in decoders}
    with console.stage("decoding") as update:
        for done, prompt in enumerate(workload.prompts, start=1):
            inputs, answers = prompt.inputs(processor), set()
            times: dict[str, list[float]] = {name: [] for name in decoders}
            for name in [name for _ in range(repeats) for name in order.sample(list(decoders), len(decoders))]:
                out = decoders[name].generate(**inputs, **prompt.settings.generation)
                times[name].append(out.stats.decode_ms)
                answers.add(tuple(out.sequences[0].tolist()))
            assert len(answers) == 1, f"prompt {done}: the answers differ"
            for name, found in times.items():
                ms[name].append(float(np.median(found)))
            update(done, prompts, "")
    arrays = {name: np.array(found) for name, found in ms.items()}

    def ratio(above: str, below: str) -> str:
        low, high = bootstrap_ratio(arrays[above], arrays[below])
        return f"{arrays[above].sum() / arrays[below].sum():.3f} ({low:.3f}-{high:.3f})"

    console.table(
        f"{prompts} held-out prompts; all answers equal plain decoding's",
        ["profile", "speedup over plain decoding", "over the first profile"],
        [[name, ratio(AR, name), ratio(str(profiles[0]), name)] for name in map(str, profiles)],
    )


if __name__ == "__main__":
    main()
