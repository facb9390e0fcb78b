"""``autotune bench-server``: a serving engine with exported settings, against the prediction of the export, prompt by prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.export.document import Export
from autotune.serving.client import EngineClient
from autotune.serving.measuring import EngineRuns, PromptRun, measure_engines
from autotune.serving.prediction import PredictedPrompt, acceptance_by_position, load_export, predict
from autotune.serving.server import ServerOptions, started, without_speculation
from autotune.workloads.workload import Workload

SPECULATIVE, PLAIN = "speculative", "plain"
"""The engine with the exported settings, and without speculation."""
RATES = ("requests_per_second", "tokens_per_second")


@dataclass(frozen=True)
class PromptComparison:
    prompt: str
    task: str
    has_image: bool
    tokens: int
    first_difference: int | None
    """Index of the first token that differs from the target's plain decoding in this project's runtime; None: all are the same."""
    reads_same_prompt: bool | None
    """Whether the engine read the same tokens as this project's runtime; None if it does not say."""
    predicted_rounds: int
    rounds: int


def bench(
    profile: Path,
    workload: Workload,
    device: str,
    console: Console,
    *,
    engine: EngineClient | ServerOptions,
    folder: Path | None = None,
    requests_at_once: Sequence[int] = (1,),
) -> dict[str, Any]:
    """Compare an engine with the prediction of an export, and print tables; returns the figures as JSON.

    Args:
        engine: one that runs, and serves no other clients; or options for vLLM, which is started with the exported
            command, and without speculation.
        folder: of the export; None: ``exports/ENGINE``.

    Raises:
        UserError: see ``load_export`` and ``predict``; the engine's version was not checked, or it runs other settings.
    """
    export = load_export(profile, folder)
    arms: dict[str, AbstractContextManager[EngineClient]]
    if isinstance(engine, EngineClient):
        require_checked(engine, export)
        arms = {SPECULATIVE: nullcontext(engine)}
    else:
        commands = {SPECULATIVE: export.command, PLAIN: without_speculation(export.command)}
        arms = {arm: started_checked(command, engine, export, console) for arm, command in commands.items()}
    predicted = predict(export, workload, device, console, DecodingProfile.load(profile).dtype)
    measured = measure_engines(arms, predicted, requests_at_once, console)
    compared = [_comparison(*pair) for pair in zip(predicted, measured[SPECULATIVE].prompts, strict=True)]
    accepted = _acceptance(measured[SPECULATIVE], export)
    plain = None if PLAIN not in measured else zip(measured[PLAIN].prompts, predicted, strict=True)
    print_rounds(export, compared, console)
    print_throughput(export, measured, console)
    return {
        "provenance": stamp().model_dump(mode="json"),
        "engine": export.engine,
        "engine_version": export.engine_version,
        "profile": export.profile,
        "target": export.target.model_dump(),
        "draft": export.draft.model_dump(),
        "settings": export.settings,
        "predicted": export.predicted.model_dump(),
        "prompts": [asdict(one) for one in compared],
        "plain_prompts_identical": plain and sum(run.answer.tokens == prompt.tokens for run, prompt in plain),
        "acceptance_by_position": {
            "predicted": acceptance_by_position(predicted, export.tree.depth),
            "engine": accepted,
        },
        "throughput": [
            {"arm": arm, **asdict(speed)} | {name: getattr(speed, name) for name in RATES}
            for arm, runs in measured.items()
            for speed in runs.speeds
        ],
    }


def require_checked(client: EngineClient, export: Export) -> None:
    """Check that the version of an engine is the one that an export's settings were checked against.

    Raises:
        UserError: another version.
    """
    checked = export.engine_version
    if client.version.partition("+")[0] != checked:
        raise UserError(
            f"{client.url}: vllm {client.version} runs there, and the export's settings were checked against {checked}; "
            f"run vllm {checked}"
        )


@contextmanager
def started_checked(command: str, options: ServerOptions, export: Export, console: Console) -> Iterator[EngineClient]:
    """Start vLLM with a command and check its version; see ``server.started``."""
    console.say(f"starting {command}")
    with started(command, options) as client:
        require_checked(client, export)
        yield client


def _acceptance(runs: EngineRuns, export: Export) -> list[float]:
    """Share of the rounds that accept a draft token at each position. An engine that did not speculate, or drafted other numbers of
    tokens than exported, is refused.
    """
    counts = [run.counts for run in runs.prompts]
    num_rounds = sum(count.rounds for count in counts)
    if not num_rounds:
        raise UserError(
            f"{runs.engine.url}: the engine counts no speculation in its metrics; start it with the exported settings: {export.command}"
        )
    drafted = sum(count.drafted for count in counts) / num_rounds
    if round(drafted) != export.tree.depth:
        raise UserError(
            f"{runs.engine.url}: the engine drafted {drafted:.2f} tokens a round, and the export says {export.tree.depth}; start it with "
            f"the exported settings: {export.command}"
        )
    accepted = itertools.zip_longest(*(count.accepted for count in counts), fillvalue=0)
    return [sum(position) / num_rounds for position in accepted]


def _comparison(predicted: PredictedPrompt, run: PromptRun) -> PromptComparison:
    read = run.answer.prompt_tokens
    pairs = enumerate(itertools.zip_longest(run.answer.tokens, predicted.tokens))
    return PromptComparison(
        prompt=predicted.prompt.name,
        task=predicted.prompt.settings.task,
        has_image=bool(predicted.prompt.pixels),
        tokens=len(run.answer.tokens),
        first_difference=next((index for index, (token, expected) in pairs if token != expected), None),
        reads_same_prompt=None if read is None else read == predicted.prompt_tokens,
        predicted_rounds=len(predicted.accepted_lengths),
        rounds=run.counts.rounds,
    )


# --------------------------------------------------------------------------------------------------------------- tables


def print_rounds(export: Export, compared: Sequence[PromptComparison], console: Console) -> None:
    """Print a row for the prompts without an image and one for those with an image, and name answers that differ."""
    rows = []
    for label, has_image in (("without image", False), ("with image", True)):
        group = [prompt for prompt in compared if prompt.has_image == has_image]
        if not group:
            continue
        predicted, rounds = (sum(getattr(prompt, name) for prompt in group) for name in ("predicted_rounds", "rounds"))
        rows.append(
            [
                label,
                f"{len(group)}",
                f"{sum(prompt.first_difference is None for prompt in group)}/{len(group)}",
                f"{sum(prompt.tokens for prompt in group)}",
                f"{predicted}",
                f"{rounds}",
                f"{sum(prompt.rounds == prompt.predicted_rounds for prompt in group)}/{len(group)}",
                f"{100 * (rounds / max(1, predicted) - 1):+.1f} %",
            ]
        )
    console.table(
        f"{export.engine} {export.engine_version}, {export.target.id} with {export.draft.id}, against its prediction",
        ["prompts", "number", "same answer", "tokens", "predicted rounds", "rounds", "equal rounds", "difference"],
        rows,
    )
    for prompt in (prompt for prompt in compared if prompt.first_difference is not None):
        console.say(f"{prompt.prompt}: the engine's answer differs from token {prompt.first_difference} on")
    if differing := [prompt.prompt for prompt in compared if prompt.reads_same_prompt is False]:
        console.say(
            f"the engine reads other tokens of {len(differing)} prompts than this project's runtime: {', '.join(differing[:8])}"
        )


def print_throughput(export: Export, measured: Mapping[str, EngineRuns], console: Console) -> None:
    """Print a row for each arm and number of requests, with the speedup over the engine without speculation."""
    plain = measured[PLAIN].speeds if PLAIN in measured else ()
    baselines = {speed.requests_at_once: speed.requests_per_second for speed in plain}
    rows = [
        [
            arm,
            f"{(at_once := speed.requests_at_once)}",
            f"{speed.requests_per_second:.2f}",
            f"{speed.tokens_per_second:.0f}",
            f"{speed.requests_per_second / baselines[at_once]:.2f}x" if baselines else "-",
        ]
        for arm, runs in measured.items()
        for speed in runs.speeds
    ]
    console.table(
        f"Speed over HTTP, prefill included; the export predicts {export.predicted.speedup:.2f}x without prefill, by its own prices",
        [export.engine, "requests at once", "requests/s", "tokens/s", "speedup"],
        rows,
    )
