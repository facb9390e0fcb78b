"""``autotune bench-server``: a serving engine with exported settings, against the prediction of the export, prompt by prompt."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.export.document import Export
from autotune.serving.client import Counters, EngineClient
from autotune.serving.prediction import PredictedPrompt, load_export, predict
from autotune.serving.server import running
from autotune.serving.vllm_server import VllmEngine
from autotune.workloads.workload import Workload


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
    engine: EngineClient | VllmEngine,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Compare an engine's answers and rounds with the prediction of an export, and print a table; returns the figures as JSON.

    Args:
        engine: one that runs, and serves no other clients; or vLLM, which is started with the exported command.
        folder: of the export; None: ``exports/ENGINE``.

    Raises:
        UserError: see ``load_export`` and ``predict``; the engine runs other settings.
    """
    export = load_export(profile, folder)
    predicted = predict(export, workload, device, console, DecodingProfile.load(profile).dtype)
    with ExitStack() as stack:
        if isinstance(engine, VllmEngine):
            console.say(f"starting {export.command}")
            words = [str(engine.executable), *shlex.split(export.command)[1:], *engine.arguments]
            client = EngineClient(stack.enter_context(running(words, engine.program))[0])
        else:
            client = engine
        answered = decode_prompts(client, predicted, console)
    compared = [_comparison(*pair) for pair in zip(predicted, answered, strict=True)]
    require_chain(client.url, [counts for *_, counts in answered], export)
    print_rounds(export, compared, console)
    return {
        "provenance": stamp().model_dump(mode="json"),
        "engine": export.engine,
        "engine_version": client.version,
        "profile": export.profile,
        "target": export.target.model_dump(),
        "draft": export.draft.model_dump(),
        "settings": export.settings,
        "predicted": export.predicted.model_dump(),
        "prompts": [asdict(one) for one in compared],
    }


def decode_prompts(
    engine: EngineClient, predicted: Sequence[PredictedPrompt], console: Console
) -> list[tuple[list[int], list[int] | None, Counters]]:
    """Answers, prompts as they were read, and counts, one prompt at a time."""
    answered = []
    with console.stage("prompt by prompt") as update:
        for prompt in predicted:
            before = engine.counters()
            answer, read = engine.complete(prompt.prompt, prompt.prompt_tokens)
            answered.append((answer, read, engine.counters_after(before, len(answer))))
            update(len(answered), len(predicted), "")
    return answered


def require_chain(url: str, counts: Sequence[Counters], export: Export) -> None:
    """Refuse an engine that did not speculate, or drafted other numbers of tokens than exported."""
    num_rounds = sum(count.rounds for count in counts)
    if not num_rounds:
        raise UserError(
            f"{url}: the engine counts no speculation in its metrics; start it with the exported settings: {export.command}"
        )
    drafted = sum(count.drafted for count in counts) / num_rounds
    if round(drafted) != export.tree.depth:
        raise UserError(
            f"{url}: the engine drafted {drafted:.2f} tokens a round, and the export says {export.tree.depth}; start it with "
            f"the exported settings: {export.command}"
        )


def _comparison(predicted: PredictedPrompt, answered: tuple[list[int], list[int] | None, Counters]) -> PromptComparison:
    answer, read, counts = answered
    pairs = enumerate(itertools.zip_longest(answer, predicted.tokens))
    return PromptComparison(
        prompt=predicted.prompt.name,
        task=predicted.prompt.settings.task,
        has_image=bool(predicted.prompt.pixels),
        tokens=len(answer),
        first_difference=next((index for index, (token, expected) in pairs if token != expected), None),
        reads_same_prompt=None if read is None else read == predicted.prompt_tokens,
        predicted_rounds=len(predicted.accepted_lengths),
        rounds=counts.rounds,
    )


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
