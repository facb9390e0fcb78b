"""``autotune bench --engine``: a serving engine with exported settings, against the prediction of the export, prompt by prompt."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.export.document import Export, Variant
from autotune.export.exporter import ENGINES
from autotune.serving.client import Counters, EngineClient
from autotune.serving.prediction import PredictedPrompt, acceptance_by_position, load_export, predict
from autotune.workloads.workload import Workload

SPECULATIVE, PLAIN = "speculative", "plain"
"""The engine with the exported settings, and without speculation."""


@dataclass(frozen=True)
class PromptComparison:
    """One prompt in the engine with the exported settings, beside its prediction."""

    prompt: str
    task: str
    has_image: bool
    tokens: int
    first_difference: int | None
    """Index of the first token that is not that of the target's plain decoding in this project's runtime; None: all are the same."""
    reads_same_prompt: bool | None
    """Whether the engine read the same tokens as this project's runtime; None if it does not say."""
    predicted_rounds: int
    rounds: int


@dataclass(frozen=True)
class Throughput:
    """An engine on all prompts, with a number of requests at a time."""

    arm: str
    requests_at_once: int
    requests_per_second: float
    tokens_per_second: float


def bench_running(
    profile: Path,
    client: EngineClient,
    workload: Workload,
    device: str,
    console: Console,
    *,
    folder: Path | None = None,
    requests_at_once: Sequence[int] = (1,),
) -> dict[str, Any]:
    """Compare an engine that runs with the prediction of an export and print tables; returns the figures as JSON.

    Args:
        client: of the engine, which serves no other clients.
        folder: of the export; None: ``exports/ENGINE``.

    Raises:
        UserError: see ``load_export`` and ``predict``; the engine's version was not checked, or it runs other settings; a prompt
            is sampled.
    """
    require_greedy(workload)
    export = load_export(DecodingProfile.load(profile), profile, client.name, folder or Path("exports") / client.name)
    variant = running_variant(client, export)
    predicted = predict(export, variant, workload, device, console)
    return compare(export, variant, {SPECULATIVE: client}, predicted, requests_at_once, console)


def require_greedy(workload: Workload) -> None:
    """Check that answers can be compared.

    Raises:
        UserError: a prompt is sampled.
    """
    for prompt in workload.prompts:
        if prompt.settings.temperature > 0.0:
            raise UserError(
                f"{prompt.name}: engines are compared at temperature 0, because each samples with noise of its own; give --temperature 0"
            )


def running_variant(client: EngineClient, export: Export) -> Variant:
    """The exported variant that an engine runs, as far as the engine tells its settings.

    Raises:
        UserError: the engine's version was not checked, or it runs none of them.
    """
    checked = ENGINES[client.name].of_version(export.engine_version).version
    if client.version.partition("+")[0] != checked:
        raise UserError(
            f"{client.url}: {client.name} {client.version} runs there, and the export's settings were checked against {checked}; "
            f"run {client.name} {checked}"
        )
    known = client.about
    for variant in export.variants:
        told = {name: value for name, value in variant.settings.items() if value not in variant.companions}
        if variant.tree is not None and all(known.get(name, value) == value for name, value in told.items()):
            return variant
    raise UserError(
        f"{client.url}: the engine runs none of the exported settings; start it with: {export.variants[0].command}"
    )


def compare(
    export: Export,
    variant: Variant,
    engines: dict[str, EngineClient],
    predicted: Sequence[PredictedPrompt],
    requests_at_once: Sequence[int],
    console: Console,
) -> dict[str, Any]:
    """Compare engines, by arm, with a prediction, and print tables; returns the figures as JSON.

    Arms take turns prompt by prompt, in random order, after each has decoded the first prompt with an image and the first
    without.
    """
    order = random.Random(0)
    seconds = dict.fromkeys(engines, 0.0)
    compared, counts = [], Counters(0, None)
    for client in engines.values():
        _warm_up(client, predicted)
    first = engines[SPECULATIVE].counters()
    with console.stage("engine, prompt by prompt") as update:
        for done, one in enumerate(predicted, start=1):
            for arm in order.sample(list(engines), len(engines)):
                before = engines[arm].counters()
                answer = engines[arm].answer(one.prompt, one.prompt_tokens)
                after = engines[arm].counters_after(before, len(answer.tokens))
                seconds[arm] += answer.seconds
                if arm == SPECULATIVE:
                    compared.append(
                        _comparison(one, answer.tokens, answer.prompt_tokens, _rounds(after, engines[arm], variant))
                    )
            update(done, len(predicted), "")
    counts = engines[SPECULATIVE].counters().since(first)
    _check_depth(counts, variant, engines[SPECULATIVE])
    num_tokens = sum(one.tokens for one in compared)
    speeds = [Throughput(arm, 1, len(predicted) / total, num_tokens / total) for arm, total in seconds.items()]
    for at_once in requests_at_once:
        if at_once > 1:
            speeds += [_throughput(arm, client, predicted, at_once) for arm, client in engines.items()]
    print_comparison(export, compared, console)
    print_throughput(export, variant, speeds, console)
    return {
        "provenance": stamp().model_dump(mode="json"),
        "engine": export.engine,
        "engine_version": export.engine_version,
        "profile": export.profile,
        "target": export.target.model_dump(),
        "draft": export.draft.model_dump(),
        "variant": variant.name,
        "settings": variant.settings,
        "predicted": variant.predicted.model_dump(),
        "prompts": [asdict(one) for one in compared],
        "acceptance_by_position": {
            "predicted": acceptance_by_position(predicted, variant.tree.max_depth) if variant.tree else None,
            "engine": [accepted / counts.rounds for accepted in counts.accepted] if counts.rounds else None,
        },
        "throughput": [asdict(speed) for speed in speeds],
    }


def _warm_up(client: EngineClient, predicted: Sequence[PredictedPrompt]) -> None:
    """Decode the first prompt with an image and the first without."""
    before, num_tokens = client.counters(), 0
    for one in {bool(one.prompt.pixels): one for one in reversed(predicted)}.values():
        num_tokens += len(client.answer(one.prompt, one.prompt_tokens).tokens)
    client.counters_after(before, num_tokens)


def _rounds(counts: Counters, client: EngineClient, variant: Variant) -> int:
    if counts.rounds is None:
        raise UserError(
            f"{client.url}: the engine counts no speculation in its metrics; start it with the exported settings: {variant.command}"
        )
    return counts.rounds


def _check_depth(counts: Counters, variant: Variant, client: EngineClient) -> None:
    """Check that the engine drafted as many tokens a round as the variant does.

    Raises:
        UserError: it drafted another number.
    """
    if counts.drafted is None or not counts.rounds or variant.tree is None:
        return
    drafted = counts.drafted / counts.rounds
    if round(drafted) != variant.tree.max_nodes:
        raise UserError(
            f"{client.url}: the engine drafted {drafted:.2f} tokens a round, and the export says {variant.tree.max_nodes}; start it with "
            f"the exported settings: {variant.command}"
        )


def _comparison(
    one: PredictedPrompt, tokens: list[int], prompt_tokens: list[int] | None, num_rounds: int
) -> PromptComparison:
    pairs = enumerate(zip(tokens, one.tokens, strict=False))
    first = next((index for index, (found, expected) in pairs if found != expected), None)
    if first is None and len(tokens) != len(one.tokens):
        first = min(len(tokens), len(one.tokens))
    return PromptComparison(
        prompt=one.prompt.name,
        task=one.prompt.settings.task,
        has_image=bool(one.prompt.pixels),
        tokens=len(tokens),
        first_difference=first,
        reads_same_prompt=None if prompt_tokens is None else prompt_tokens == one.prompt_tokens,
        predicted_rounds=one.num_rounds,
        rounds=num_rounds,
    )


def _throughput(arm: str, client: EngineClient, predicted: Sequence[PredictedPrompt], at_once: int) -> Throughput:
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda one: client.answer(one.prompt, one.prompt_tokens), predicted))
    seconds = time.perf_counter() - started
    num_tokens = sum(len(answer.tokens) for answer in answers)
    return Throughput(arm, at_once, len(predicted) / seconds, num_tokens / seconds)


# --------------------------------------------------------------------------------------------------------------- tables


def print_comparison(export: Export, compared: Sequence[PromptComparison], console: Console) -> None:
    """Print a row for the prompts without an image and one for those with an image, and name answers that differ."""
    rows = []
    for label, has_image in (("without image", False), ("with image", True)):
        group = [one for one in compared if one.has_image == has_image]
        if not group:
            continue
        predicted, found = (sum(getattr(one, name) for one in group) for name in ("predicted_rounds", "rounds"))
        rows.append(
            [
                label,
                f"{len(group)}",
                f"{sum(one.first_difference is None for one in group)}/{len(group)}",
                f"{sum(one.tokens for one in group)}",
                f"{predicted}",
                f"{found}",
                f"{sum(one.rounds == one.predicted_rounds for one in group)}/{len(group)}",
                f"{100 * (found / max(1, predicted) - 1):+.1f} %",
            ]
        )
    console.table(
        f"{export.engine} {export.engine_version}, {export.target.id} with {export.draft.id}, against its prediction",
        ["prompts", "number", "same answer", "tokens", "predicted rounds", "rounds", "equal rounds", "difference"],
        rows,
    )
    for one in (one for one in compared if one.first_difference is not None):
        console.say(f"{one.prompt}: the engine's answer differs from token {one.first_difference} on")
    if others := [one.prompt for one in compared if one.reads_same_prompt is False]:
        console.say(
            f"the engine reads other tokens of {len(others)} prompts than this project's runtime: {', '.join(others[:8])}"
        )


def print_throughput(export: Export, variant: Variant, speeds: Sequence[Throughput], console: Console) -> None:
    """Print a row for each arm and number of requests, with the speedup over the engine without speculation."""
    plain = {speed.requests_at_once: speed.requests_per_second for speed in speeds if speed.arm == PLAIN}
    rows = []
    for speed in speeds:
        baseline = plain.get(speed.requests_at_once)
        rows.append(
            [
                speed.arm,
                f"{speed.requests_at_once}",
                f"{speed.requests_per_second:.2f}",
                f"{speed.tokens_per_second:.0f}",
                "-" if baseline is None else f"{speed.requests_per_second / baseline:.2f}x",
            ]
        )
    console.table(
        f"Speed over HTTP, prefill included; the export predicts {variant.predicted.speedup:.2f}x without prefill, by its own prices",
        [export.engine, "requests at once", "requests/s", "tokens/s", "speedup"],
        rows,
    )
