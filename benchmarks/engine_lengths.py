"""Measures every draft length from 0 to 8 in vLLM, all servers in turns, beside the lengths that an export chooses at the engine's prices.

Needs the folder of ``autotune export PROFILE --to vllm`` and the file of ``autotune bench-server PROFILE --prices``. Prints, by the number of
requests at once, the time of all prompts over that of the fastest length, prefills included, medians of the passes. The nine servers take about 2 GB each,
and 6 minutes to start on two cores; a pass over 16 prompts takes 3 minutes.

    python benchmarks/engine_lengths.py PROFILE [--export exports/vllm] [--executable vllm] [--arguments '--gpu-memory-utilization 0.04']
"""

from __future__ import annotations

import random
import shlex
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.serving.measuring import throughput, warm_up
from autotune.serving.prediction import load_export, predict
from autotune.serving.prices import PRICED_BATCHES
from autotune.serving.server import EXECUTABLE_VARIABLE, ServerOptions, find_executable, started, with_draft_tokens
from autotune.workloads.workload import load_workload


@click.command()
@click.argument("profile", type=click.Path(path_type=Path, exists=True))
@click.option("--export", "folder", type=click.Path(path_type=Path), default=Path("exports/vllm"), show_default=True)
@click.option("--executable", envvar=EXECUTABLE_VARIABLE)
@click.option("--arguments", default="")
@click.option("--longest", default=8, show_default=True, help="Largest draft length.")
@click.option("--prompts", default=16, show_default=True)
@click.option("--tokens", default=48, show_default=True, help="Longest answer.")
@click.option("--passes", default=3, show_default=True)
def main(
    profile: Path,
    folder: Path,
    executable: str | None,
    arguments: str,
    longest: int,
    prompts: int,
    tokens: int,
    passes: int,
) -> None:
    console, document = Console(), DecodingProfile.load(profile)
    export = load_export(profile, folder)
    workload = load_workload(document.workload.name, "evaluate", num_prompts=prompts).cut(prompts, tokens)
    predicted = predict(export, workload, "cpu", console)
    options = ServerOptions(find_executable(executable), tuple(shlex.split(arguments)))
    lengths, order = range(longest + 1), random.Random(0)
    seconds: dict[tuple[int, int], list[float]] = {}
    with ExitStack() as stack:
        engines = {}
        for length in lengths:
            console.say(f"starting vLLM with {length} draft tokens")
            engines[length] = stack.enter_context(started(with_draft_tokens(export.command, length), options))
            warm_up(engines[length], predicted)
        with console.stage("passes") as update:
            for number in range(passes):
                for size in PRICED_BATCHES:
                    for length in order.sample(lengths, len(lengths)):
                        found = throughput(engines[length], predicted, size).seconds
                        seconds.setdefault((size, length), []).append(found)
                update(number + 1, passes, "")
    medians = {key: float(np.median(found)) for key, found in seconds.items()}
    rows = []
    for size in PRICED_BATCHES:
        fastest = min(medians[size, length] for length in lengths)
        rows.append([f"{size}", *(f"{medians[size, length] / fastest:.2f}" for length in lengths)])
    console.table(
        "time over that of the fastest draft length, by requests at once", ["requests", *map(str, lengths)], rows
    )


if __name__ == "__main__":
    main()
