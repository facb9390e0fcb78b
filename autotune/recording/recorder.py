"""Records traces: the target's answers once, then a draft's proposals at every position of them, many positions at a
time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from autotune.documents.execution import EAGER
from autotune.documents.provenance import ModelReference, stamp
from autotune.documents.subnet import Subnet, VisualRanking
from autotune.drafters.checkpoint import LoadedDraft
from autotune.drafters.draft import AnswerToRecord, Draft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.files import content_key, write_bytes
from autotune.modeling.prompt import EncodedPrompt, num_patches
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.recording.answers import ANSWERS_AT_ONCE, AnswerRecorder, read_answer, write_answer
from autotune.recording.answers import Answer as Answer
from autotune.replay.trace import FOREST, PER_PROMPT, Forest, ForestBounds, RecordedPrompt, Trace, TraceHeader, join
from autotune.runtime.answer_keys import SOFTWARE, AnswerKeys
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.limits import MAX_STEP
from autotune.workloads.conversations import Conversations
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload

MAX_FEATURE_BYTES = 2 << 30  # of the features kept in memory
Report = Callable[[int, int], None]
"""Called as report(done, of)."""


@dataclass(frozen=True)
class TargetFeatures:
    """The target's hidden states of a prompt and its answer, for drafts that read them. Both are by layer."""

    prompts: Sequence[EncodedPrompt]
    prompt_hidden: dict[int, Tensor]
    """[prompt tokens, hidden]"""
    answer_hidden: dict[int, Tensor]
    """[answer tokens, hidden], in each row those of the token before."""

    @property
    def num_bytes(self) -> int:
        return sum(h.nbytes for part in (self.prompt_hidden, self.answer_hidden) for h in part.values())


class Recorder:
    """Records with one loaded target. Work is idempotent and crash-safe: every answer and every forest is written to a
    file of its own under ``folder`` as soon as it is complete, named by a hash of what it depends on.
    """

    def __init__(
        self,
        target: Target,
        target_reference: ModelReference,
        processor: Any,
        folder: Path,
        *,
        mode: str = EAGER,
        keys: AnswerKeys | None = None,
    ) -> None:
        """``mode``: how answers that are not batched are decoded; ``keys``: those of the target and processor, which
        several recorders may share.
        """
        self.target = target
        self.target_reference = target_reference
        self.processor = processor
        self.folder = folder
        self.mode = mode
        self.keys = keys or AnswerKeys(target, processor)
        self.layers: tuple[int, ...] = ()
        """Layers of the target whose outputs are kept in memory, to record several drafts that read them."""
        self._features: dict[tuple[str, int], TargetFeatures] = {}
        self._answers = AnswerRecorder(target, processor, mode)
        self._retrieval = RetrievalDraft()
        self._retrieval.attach(target)

    def answers(self, workload: Workload) -> list[Answer]:
        """The target's answer to every prompt, by plain decoding."""
        answers = {prompt.sha256: answer for prompt, answer in self._each_answer(workload.prompts)}
        return [answers[prompt.sha256] for prompt in workload.prompts]

    def _each_answer(self, prompts: Sequence[WorkloadPrompt]) -> Iterator[tuple[WorkloadPrompt, Answer]]:
        for first in range(0, len(prompts), ANSWERS_AT_ONCE):
            missing = []
            for prompt in prompts[first : first + ANSWERS_AT_ONCE]:
                if (answer := read_answer(self._answer_path(prompt), self._answer_key(prompt))) is not None:
                    yield prompt, answer
                else:
                    missing.append(prompt)
            for prompt, answer in self._answers.record(missing):
                write_answer(self._answer_path(prompt), self._answer_key(prompt), answer)
                yield prompt, answer

    def answers_to_train_on(self, prompts: Sequence[WorkloadPrompt]) -> list[list[int]]:
        """The tokens of the target's answers, missing ones decoded in one batch. Each has a file of its own, beside
        those of ``answers``, from which they may differ where two tokens are nearly tied.
        """
        paths = {prompt.sha256: self._answer_path(prompt, "training-answers") for prompt in prompts}
        keys = {prompt.sha256: self._answer_key(prompt) for prompt in prompts}
        known = {sha256: read_answer(path, keys[sha256]) for sha256, path in paths.items()}
        found = {sha256: answer.tokens for sha256, answer in known.items() if answer is not None}
        missing = list({prompt.sha256: prompt for prompt in prompts if prompt.sha256 not in found}.values())
        for prompt, tokens in zip(missing, self._answers.write_together(missing) if missing else (), strict=True):
            found[prompt.sha256] = tokens
            write_answer(paths[prompt.sha256], keys[prompt.sha256], Answer(tokens, 0, {}))
        return [found[prompt.sha256] for prompt in prompts]

    def follow(self, workload: Workload, deadline: float = math.inf) -> Workload:
        """The workload with the target's answers that its later turns follow, which are recorded as all answers are: of
        the first prompts alone, where the next ones are not expected before ``deadline``, of ``time.monotonic``.
        """

        def decode(prompts: Sequence[WorkloadPrompt]) -> list[list[int]]:
            return [answer.tokens for answer in self.answers(replace(workload, prompts=tuple(prompts)))]

        conversations, followed, longest_s = Conversations(self.processor, decode), list[WorkloadPrompt](), 0.0
        for first in range(0, len(workload.prompts), ANSWERS_AT_ONCE):
            if (began := time.monotonic()) + longest_s > deadline and followed:
                break
            followed += conversations.follow_all(workload.prompts[first : first + ANSWERS_AT_ONCE])
            longest_s = max(longest_s, time.monotonic() - began)
        return replace(workload, prompts=tuple(followed))

    def sampler(self, prompt: WorkloadPrompt) -> TokenSampler | None:
        return self._answers.sampler(prompt)

    def _answer_path(self, prompt: WorkloadPrompt, folder: str = "answers") -> Path:
        """The file of an answer, which is of the same name while the weights and the prompt are the same."""
        return self.folder / folder / f"{self._key_with(prompt.sha256)}.json"

    def _answer_key(self, prompt: WorkloadPrompt) -> str:
        """Hash of everything that an answer follows from."""
        return self._key_with(SOFTWARE, self.keys.of(prompt))

    def _key_with(self, *content: object) -> str:
        modes = [] if self.mode == EAGER else [self.mode]  # near ties may fall otherwise
        reference = self.target_reference.sha256 or self.target_reference.id
        return content_key([reference, self.target.text.precision, *content, *modes])

    def trace(
        self,
        draft: LoadedDraft,
        draft_reference: ModelReference,
        workload: Workload,
        *,
        visual_keep: float,
        visual_ranking: VisualRanking = "text_after_image",
        bounds: ForestBounds,
    ) -> Trace:
        """The proposals of the draft, which sees the first ``visual_keep`` of the visual tokens by ``visual_ranking``,
        along the target's answers.
        """
        draft.visual_keep = visual_keep
        subnet = draft.subnet.model_copy(update={"visual_ranking": visual_ranking})
        reference = draft_reference.sha256 or draft_reference.id
        draft_key = content_key([reference, subnet.model_dump(), bounds.model_dump()])
        folder = self.folder / "forests" / draft_key
        parts = []
        for prompt, whole in zip(workload.prompts, self.answers(workload), strict=True):
            path = folder / f"{self._answer_key(prompt)}.safetensors"
            part = _read_part(path)
            if part is None:
                answer = replace(whole, tokens=whole.tokens[: bounds.answer_tokens])
                inputs = prompt.inputs(self.processor, draft.device)
                outputs = self.target_features(prompt, inputs, answer, draft.aux_layers) if draft.aux_layers else None
                options: dict[str, Any] = {"visual_ranking": visual_ranking, "sampler": self.sampler(prompt)}
                part = record_forest(self.target, draft, inputs, answer, bounds, outputs, **options)
                part = part._replace(
                    forest=self._with_retrieved(part.forest, inputs),
                    num_patches=num_patches(self.target.model.config, inputs),
                )
                _write_part(path, part)
            parts.append(part)
        return join(self.header(draft, draft_reference, subnet, draft.aux_layers, workload, bounds), parts)

    def _with_retrieved(self, forest: Forest, inputs: dict[str, Any]) -> Forest:
        """The forest with what the prompt and the answer hold of every token's continuation."""
        (prompt,) = self._retrieval.prompts(inputs)
        self._retrieval.prefill(prompt, None, capacity=0)
        found = []
        for token in forest.answer:
            self._retrieval.append(int(token))
            found.append(self._retrieval.continuation())
        tokens, lengths = zip(*found, strict=True)
        return replace(forest, retrieved=np.array(tokens), match_length=np.array(lengths, np.int64))

    def header(
        self,
        draft: LoadedDraft,
        draft_reference: ModelReference,
        subnet: Subnet,
        aux_layers: tuple[int, ...],
        workload: Workload,
        bounds: ForestBounds,
    ) -> TraceHeader:
        return TraceHeader(
            provenance=stamp(),
            target=self.target_reference,
            draft=draft_reference,
            draft_kind=draft.kind,
            subnet=subnet,
            aux_layers=aux_layers,
            workload=workload.name,
            workload_sha256=workload.sha256,
            bounds=bounds,
            prompts=[prompt.name for prompt in workload.prompts],
            tasks=[prompt.settings.task for prompt in workload.prompts],
        )

    def target_features(
        self, prompt: WorkloadPrompt, inputs: dict[str, Any], answer: Answer, layers: Sequence[int]
    ) -> TargetFeatures:
        """The target's outputs for the prompt and its answer, for a draft that reads ``layers``. Those of
        ``self.layers`` are kept in memory.
        """
        if not set(layers) <= set(self.layers):
            return run_target(self.target, inputs, answer, layers)
        key = prompt.sha256, len(answer.tokens)
        if key not in self._features:
            outputs = run_target(self.target, inputs, answer, self.layers)
            if outputs.num_bytes + sum(kept.num_bytes for kept in self._features.values()) > MAX_FEATURE_BYTES:
                return outputs
            self._features[key] = outputs
        return self._features[key]


def _read_part(path: Path) -> RecordedPrompt | None:
    """None where the record is missing or damaged."""
    try:
        arrays = load(path.read_bytes())
        forest = Forest(*(arrays[name] for name in FOREST))
        lengths = dict(zip(PER_PROMPT, arrays["lengths"].tolist(), strict=True))
        return RecordedPrompt(forest, **lengths)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None


def _write_part(path: Path, part: RecordedPrompt) -> None:
    arrays = {name: np.ascontiguousarray(getattr(part.forest, name)) for name in FOREST}
    lengths = np.array([getattr(part, name) for name in PER_PROMPT])
    write_bytes(path, save({**arrays, "lengths": lengths}))


@torch.inference_mode()
def run_target(target: Target, inputs: dict[str, Any], answer: Answer, layers: Sequence[int]) -> TargetFeatures:
    tokens = np.array(answer.tokens[:-1], np.int64)  # nothing follows the last token
    target.use_mode(EAGER)  # recording has other sizes than decoding
    target.output_layers = tuple(layers)
    prompts = target.encode(inputs).prompts
    target.reserve(answer.prompt_length + len(answer.tokens))
    target.prefill(prompts[0])
    prompt_hidden = dict(target.hidden)
    answer_hidden = [{layer: states[-1:] for layer, states in prompt_hidden.items()}]
    for first in range(0, len(tokens), MAX_STEP):
        part = tokens[first : first + MAX_STEP]
        target.forward(Step.causal(part, target.mask_value))
        target.cache.advance(len(part))
        answer_hidden.append(target.hidden)
    return TargetFeatures(
        prompts,
        prompt_hidden,
        {layer: torch.cat([hidden[layer] for hidden in answer_hidden])[: len(tokens)] for layer in layers},
    )


@torch.inference_mode()
def record_forest(
    target: Target,
    draft: Draft,
    inputs: dict[str, Any],
    answer: Answer,
    bounds: ForestBounds,
    outputs: TargetFeatures | None = None,
    *,
    visual_ranking: VisualRanking = "text_after_image",
    sampler: TokenSampler | None = None,
    shares_tokens: bool = True,
) -> RecordedPrompt:
    """The forest along one answer of the target to which the draft is attached. Without ``outputs`` the target is run
    for the layers that the draft reads.

    Args:
        sampler: that of a sampled answer, to which the proposals of a draft with a model are coupled.
        shares_tokens: see ``ModelForestGrower``.
    """
    draft.use_mode(EAGER)
    if outputs is None and draft.aux_layers:
        outputs = run_target(target, inputs, answer, draft.aux_layers)
    if outputs is not None:
        target.hidden = outputs.prompt_hidden
    recorded = AnswerToRecord(
        np.array(answer.tokens, np.int64),
        answer.prompt_length,
        bounds,
        {} if outputs is None else outputs.answer_hidden,
        None if sampler is None else sampler.coupling,
        shares_tokens and not draft.aux_layers,
    )
    scores = answer.visual_scores.get(visual_ranking)
    (prompt,) = draft.prompts(inputs, () if outputs is None else outputs.prompts)
    capacity = answer.prompt_length + recorded.num_slots
    draft.prefill(prompt, None if scores is None else torch.tensor(scores, device=draft.device), capacity=capacity)
    draft_length = draft.length
    return RecordedPrompt(draft.forest(recorded), answer.prompt_length, draft_length, answer.num_visual_tokens)
