"""``autotune bench-server``: a serving engine with exported settings, against the prediction of the export, prompt by
prompt.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.acceptance.reference_replay import rounds
from autotune.acceptance.trace import Trace
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import stamp
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.export.document import EXPORT, Export
from autotune.export.vllm import NAME, SERVED
from autotune.files import WORKSPACE
from autotune.modeling.loading import load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.serving.client import Counters, EngineClient
from autotune.serving.server import running
from autotune.serving.vllm_server import VllmEngine
from autotune.trees.chain import ChainPolicy
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload


@dataclass(frozen=True)
class PromptComparison:
    prompt: str
    task: str
    has_image: bool
    tokens: int
    first_difference: int | None
    """Index of the first token that differs from the target's plain decoding in this project's runtime; None: all are
    the same.
    """
    reads_same_prompt: bool | None
    """Whether the engine read the same tokens as this project's runtime; None if it does not say."""
    predicted_rounds: int
    rounds: int


@dataclass(frozen=True)
class PredictedPrompt:
    """One prompt with the target's answer by plain decoding in this project's runtime, and the rounds of replay along
    it.
    """

    prompt: WorkloadPrompt
    prompt_tokens: list[int]
    tokens: list[int]
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
    """Compare an engine's answers and rounds with the prediction of an export, and print a table; returns the figures
    as JSON.

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
    drafted = sum(count.drafted for count in counts) / max(1, sum(count.rounds for count in counts))
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
        predicted_rounds=predicted.rounds,
        rounds=counts.rounds,
    )


def print_rounds(export: Export, compared: Sequence[PromptComparison], console: Console) -> None:
    """Print a row for the prompts without an image and one for those with an image, and name answers that differ."""
    rows = []
    for label, has_image in (("without image", False), ("with image", True)):
        if not (group := [prompt for prompt in compared if prompt.has_image == has_image]):
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


def load_export(source: Path, folder: Path | None) -> Export:
    """The export of the profile in ``source`` to vLLM; without a ``folder``, the one in ``exports/vllm``.

    Raises:
        UserError: there is none in the folder, or it is of another target.
    """
    profile, folder = DecodingProfile.load(source), folder or Path("exports") / NAME
    path = folder / EXPORT
    if not path.exists():
        raise UserError(f"{path}: no such export; run autotune export {source} -o {folder}")
    export = Export.load(path)
    if not export.target.is_same(profile.target):
        raise UserError(f"{path}: exported for other weights than the ones of {source}; run autotune export again")
    return export


def predict(
    export: Export, workload: Workload, device: str, console: Console, dtype: Any = None
) -> list[PredictedPrompt]:
    """Record the target's answers and the draft's proposals along them, as vLLM shows the draft images, and replay
    them.

    ``dtype`` is that of the target, as of ``load_model``. Records are kept in the study's folder, as those of
    ``autotune record``.

    Raises:
        UserError: a prompt is sampled, or a model has changed since the export.
    """
    for prompt in workload.prompts:
        if prompt.settings.temperature > 0.0:
            raise UserError(
                f"{prompt.name}: engines are compared at temperature 0, because each samples with noise of its own; give --temperature 0"
            )
    for wanted in (export.target, export.draft):
        if not (current := reference(wanted.id)).is_same(wanted):
            raise UserError(f"{current.id}: its weights have changed since the export; run autotune export again")
    processor = load_processor(export.target.id)
    prompts = workload.readable_by(processor)
    study = Path(export.study)
    target = Target(load_model(export.target.id, device=device, dtype=dtype, console=console))
    draft = load_draft(export.draft.id, target)
    recorder = Recorder(
        target, reference(export.target.id), processor, study if study.is_dir() else WORKSPACE / "engines"
    )
    with console.stage("target's answers and the draft's proposals") as update:
        prompts = recorder.follow(prompts)
        trace = recorder.trace(
            draft,
            reference(export.draft.id),
            prompts,
            visual_keep=1.0,
            visual_input=SERVED[export.kind].images,
            bounds=export.tree.forest_bounds,
            report=lambda done, of: update(done, of, ""),
        )
    return [_predicted(trace, number, prompt, export.tree) for number, prompt in enumerate(prompts.prompts)]


def _predicted(trace: Trace, number: int, prompt: WorkloadPrompt, tree: ChainPolicy) -> PredictedPrompt:
    begin, end = trace.answer_start[number : number + 2]
    first = int(trace.prompt_length[:number].sum())
    return PredictedPrompt(
        prompt,
        prompt_tokens=trace.prompt_tokens[first : first + trace.prompt_length[number]].tolist(),
        tokens=trace.forest.answer[begin:end].tolist(),
        rounds=sum(1 for _ in rounds(trace, number, tree)),
    )
