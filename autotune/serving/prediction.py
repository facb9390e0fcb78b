"""Predictions of an export for each prompt: the target's answer, and the rounds that replay takes for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.acceptance.reference_replay import rounds
from autotune.acceptance.trace import Trace
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.export.document import EXPORT, Export
from autotune.export.vllm import NAME, SERVED
from autotune.files import WORKSPACE
from autotune.modeling.loading import load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.trees.chain import ChainPolicy
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload


@dataclass(frozen=True)
class PredictedPrompt:
    """One prompt with the target's answer by plain decoding in this project's runtime, and the rounds of replay along it."""

    prompt: WorkloadPrompt
    prompt_tokens: list[int]
    tokens: list[int]
    accepted_lengths: list[int]
    """Draft tokens accepted in each round."""


def load_export(source: Path, folder: Path | None) -> Export:
    """The export of the profile in ``source`` to vLLM; without a ``folder``, the one in ``exports/vllm``.

    Raises:
        UserError: there is none in the folder, or it is of another target.
    """
    profile, folder = DecodingProfile.load(source), folder or Path("exports") / NAME
    path = folder / EXPORT
    if not path.exists():
        raise UserError(f"{path}: no such export; run autotune export {source} --to vllm -o {folder}")
    export = Export.load(path)
    if not export.target.is_same(profile.target):
        raise UserError(f"{path}: exported for other weights than the ones of {source}; run autotune export again")
    return export


def predict(
    export: Export, workload: Workload, device: str, console: Console, dtype: Any = None
) -> list[PredictedPrompt]:
    """Record the target's answers and the draft's proposals along them, as vLLM shows the draft images, and replay them.

    ``dtype`` is that of the target, as of ``load_model``. Records are kept in the study's folder, as those of ``autotune record``.

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
        accepted_lengths=[len(replayed.path) for replayed in rounds(trace, number, tree)],
    )
