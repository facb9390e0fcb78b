"""``autotune bench-server --prices``: the engine's own times of rounds, by draft length and number of requests at a time.

They are measured with real drafts: the time of a round does not depend on how many of its tokens are accepted, and vLLM's sampler
for CPUs has no synthetic acceptance.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from autotune.console import Console
from autotune.device import fingerprint
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import stamp
from autotune.export.engine_prices import EnginePrices, RoundTimes
from autotune.serving.client import EngineClient
from autotune.serving.comparison import started_checked
from autotune.serving.measuring import throughput, warm_up
from autotune.serving.prediction import PredictedPrompt, load_export, predict
from autotune.serving.server import ServerOptions, with_draft_tokens
from autotune.workloads.workload import Workload

PRICED_LENGTHS = (0, 1, 2, 4, 8)  # draft tokens; times between them are interpolated
PRICED_BATCHES = (1, 4, 16)  # requests at once
REPEATS = 3  # passes over the prompts; their median counts


def measure_prices(
    profile: Path,
    workload: Workload,
    device: str,
    console: Console,
    *,
    options: ServerOptions,
    folder: Path | None = None,
    requests_at_once: Sequence[int] = PRICED_BATCHES,
) -> EnginePrices:
    """Start vLLM with each draft length of an export's draft, time its rounds, and print a table of them.

    Raises:
        UserError: as ``comparison.bench``.
    """
    export = load_export(profile, folder)
    predicted = predict(export, workload, device, console, DecodingProfile.load(profile).dtype)
    sizes = sorted({1, *requests_at_once})
    samples: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for length in PRICED_LENGTHS:
        with started_checked(with_draft_tokens(export.command, length), options, export, console) as engine:
            warm_up(engine, predicted)
            with console.stage(f"rounds with {length} draft tokens") as update:
                for repeat in range(REPEATS):
                    for size in sizes:
                        samples[size, length].append(_times(engine, predicted, size))
                    update(repeat + 1, REPEATS, "")
    prices = EnginePrices(
        provenance=stamp(),
        engine=export.engine,
        engine_version=export.engine_version,
        hardware=fingerprint(device),
        target=export.target,
        draft=export.draft,
        workload=workload.name,
        times=[
            RoundTimes(
                requests_at_once=size,
                draft_tokens=length,
                round_ms=[round_ms for round_ms, _ in found],
                prefill_ms=[prefill_ms for _, prefill_ms in found],
            )
            for (size, length), found in sorted(samples.items())
        ],
    )
    console.table(
        f"{export.engine} {export.engine_version}: milliseconds of a step by the requests that share it",
        ["draft tokens", *(f"{size} at once" for size in sizes)],
        [
            [f"{length}", *(f"{size * prices.round_ms(size, length):.2f}" for size in sizes)]
            for length in prices.draft_lengths
        ],
    )
    return prices


def _times(engine: EngineClient, predicted: Sequence[PredictedPrompt], size: int) -> tuple[float, float]:
    """Milliseconds of the engine's time per round and per prefill, with ``size`` requests at once.

    Answers of one token are prefills alone; the rest of a whole answer's time is its rounds.
    """
    firsts = [dataclasses.replace(prompt, prompt=prompt.prompt.cut(1)) for prompt in predicted]
    prefills = throughput(engine, firsts, size)
    answers = throughput(engine, predicted, size)
    num_rounds = answers.rounds or answers.tokens - answers.requests
    return 1e3 * (answers.seconds - prefills.seconds) / num_rounds, 1e3 * prefills.seconds / prefills.requests
