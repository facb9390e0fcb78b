"""Records traces: the target's answers once, then a draft's proposals at every position of them, many positions at a
time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from autotune.acceptance.expansion import choose_expanded, open_columns
from autotune.acceptance.trace import Forest, ForestBounds, RecordedPrompt, Trace, TraceHeader, join
from autotune.documents.provenance import ModelReference, stamp
from autotune.documents.subnet import VISUAL_RANKINGS, Subnet, VisualRanking
from autotune.drafters.cached_draft import FeatureSource
from autotune.drafters.checkpoint import LoadedDraft
from autotune.execution import EAGER
from autotune.files import content_key, write_bytes
from autotune.modeling.prompt import Prompt
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.trees.limits import MAX_STEP, Ints
from autotune.workloads.workload import Workload, WorkloadPrompt

ROOTS_AT_ONCE = 24  # limit on the positions whose forests grow together,
NODES_AT_ONCE = 800  # and on their nodes: every node's mask has a column for each of the others
MAX_READING_BYTES = 2 << 30  # of the readings kept in memory
Report = Callable[[int, int], None]
"""Called as report(done, of)."""


@dataclass(frozen=True)
class Answer:
    """The target's answer to a prompt."""

    tokens: list[int]
    prompt_length: int
    visual_scores: dict[VisualRanking, list[float]]
    """Scores of the visual tokens, for pruning, by ranking; empty without an image."""

    @property
    def num_visual_tokens(self) -> int:
        return max(map(len, self.visual_scores.values()), default=0)


@dataclass(frozen=True)
class Reading:
    """The target's hidden states of a prompt and its answer, for drafts that read them. Both are by layer."""

    prompts: Sequence[Prompt]
    prompt_hidden: dict[int, Tensor]
    """[prompt tokens, hidden]"""
    answer_hidden: dict[int, Tensor]
    """[answer tokens, hidden], in each row those of the token before."""

    @property
    def num_bytes(self) -> int:
        return sum(h.nbytes for part in (self.prompt_hidden, self.answer_hidden) for h in part.values())


class Recorder:
    """Records with one loaded target. Work is idempotent and crash-safe: every answer and every forest is written to a file
    of its own under ``folder`` as soon as it is complete, named by a hash of what it depends on.
    """

    def __init__(self, target: Target, target_reference: ModelReference, processor: Any, folder: Path) -> None:
        self.target = target
        self.target_reference = target_reference
        self.processor = processor
        self.folder = folder
        self.layers: tuple[int, ...] = ()
        """Layers of the target whose readings are kept in memory, to record several drafts that read them."""
        self._readings: dict[tuple[str, int], Reading] = {}
        self._plain = Decoder(target)

    def answers(self, workload: Workload, report: Report | None = None) -> list[Answer]:
        """The target's answer to every prompt, by plain decoding."""
        answers = []
        for done, prompt in enumerate(workload.prompts, start=1):
            path = self.folder / "answers" / f"{self._answer_key(prompt)}.json"
            answer = _read_answer(path)
            if answer is None or not isinstance(answer.visual_scores, dict):  # files of version 0.1.0 have one ranking
                answer = self._answer(prompt, None if answer is None else answer.tokens)
                write_bytes(path, json.dumps(asdict(answer)).encode())
            answers.append(answer)
            if report is not None:
                report(done, len(workload.prompts))
        return answers

    def _answer_key(self, prompt: WorkloadPrompt) -> str:
        return content_key([self.target_reference.sha256 or self.target_reference.id, prompt.sha256])

    def _answer(self, prompt: WorkloadPrompt, tokens: list[int] | None = None) -> Answer:
        """The answer, and every ranking of the prompt's visual tokens. ``tokens``: the answer, where it is known."""
        inputs = prompt.inputs(self.processor, self.target.device)
        with torch.inference_mode():
            (encoded,) = self.target.encode(inputs).prompts
            self.target.reserve(len(encoded))
            scores = self.target.prefill(encoded, visual_rankings=VISUAL_RANKINGS).visual_scores
        length = inputs["input_ids"].shape[1]
        if tokens is None:
            sequence = self._plain.generate(**inputs, **prompt.settings.generation).sequences
            tokens = sequence[0, length:].tolist()
        return Answer(tokens, length, {ranking: scores[ranking].tolist() for ranking in scores})

    def trace(
        self,
        draft: LoadedDraft,
        draft_reference: ModelReference,
        workload: Workload,
        *,
        visual_keep: float,
        visual_ranking: VisualRanking = "text_after_image",
        bounds: ForestBounds,
        report: Report | None = None,
    ) -> Trace:
        """The proposals of the draft, which sees the first ``visual_keep`` of the visual tokens by ``visual_ranking``, along the
        target's answers.
        """
        draft.visual_keep = visual_keep
        subnet = draft.subnet.model_copy(update={"visual_ranking": visual_ranking})
        parts = []
        draft_key = [draft_reference.sha256 or draft_reference.id, subnet.model_dump(), bounds.model_dump()]
        folder = self.folder / "forests" / content_key(draft_key)
        for done, (prompt, whole) in enumerate(zip(workload.prompts, self.answers(workload), strict=True), start=1):
            path = folder / f"{self._answer_key(prompt)}.safetensors"
            part = _read_part(path)
            if part is None:
                answer = replace(whole, tokens=whole.tokens[: bounds.answer_tokens])
                inputs = prompt.inputs(self.processor, draft.device)
                reading = self.reading(prompt, inputs, answer, draft.aux_layers) if draft.aux_layers else None
                part = record_forest(self.target, draft, inputs, answer, bounds, reading, visual_ranking=visual_ranking)
                _write_part(path, part)
            parts.append(part)
            if report is not None:
                report(done, len(workload.prompts))
        return join(self.header(draft_reference, subnet, draft.aux_layers, workload, bounds), parts)

    def header(
        self,
        draft_reference: ModelReference,
        subnet: Subnet,
        aux_layers: tuple[int, ...],
        workload: Workload,
        bounds: ForestBounds,
    ) -> TraceHeader:
        """The header of a trace that is recorded here."""
        return TraceHeader(
            provenance=stamp(),
            target=self.target_reference,
            draft=draft_reference,
            subnet=subnet,
            aux_layers=aux_layers,
            workload=workload.name,
            workload_sha256=workload.sha256,
            bounds=bounds,
            prompts=[prompt.name for prompt in workload.prompts],
            tasks=[prompt.settings.task for prompt in workload.prompts],
        )

    def reading(self, prompt: WorkloadPrompt, inputs: dict[str, Any], answer: Answer, layers: Sequence[int]) -> Reading:
        """The target's reading of the prompt and its answer, for a draft that reads ``layers``. Readings of ``self.layers`` are
        kept in memory.
        """
        if not set(layers) <= set(self.layers):
            return read_target(self.target, inputs, answer, layers)
        key = prompt.sha256, len(answer.tokens)
        if key not in self._readings:
            reading = read_target(self.target, inputs, answer, self.layers)
            if reading.num_bytes + sum(kept.num_bytes for kept in self._readings.values()) > MAX_READING_BYTES:
                return reading
            self._readings[key] = reading
        return self._readings[key]


def _read_answer(path: Path) -> Answer | None:
    """None where the record is missing or damaged."""
    try:
        return Answer(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


_FOREST = tuple(field.name for field in fields(Forest))


def _read_part(path: Path) -> RecordedPrompt | None:
    """None where the record is missing or damaged."""
    try:
        arrays = load(path.read_bytes())
        return RecordedPrompt(Forest(*(arrays[name] for name in _FOREST)), *map(int, arrays["lengths"]))
    except (OSError, SafetensorError, KeyError):
        return None


def _write_part(path: Path, part: RecordedPrompt) -> None:
    arrays = {name: np.ascontiguousarray(getattr(part.forest, name)) for name in _FOREST}
    write_bytes(path, save({**arrays, "lengths": np.array(part[1:])}))


# -------------------------------------------------------------------------------------------------------------- forest


@torch.inference_mode()
def read_target(target: Target, inputs: dict[str, Any], answer: Answer, layers: Sequence[int]) -> Reading:
    """Run the target over a prompt and its own answer again, and keep the outputs of ``layers``."""
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
    return Reading(
        prompts,
        prompt_hidden,
        {layer: torch.cat([hidden[layer] for hidden in answer_hidden])[: len(tokens)] for layer in layers},
    )


@torch.inference_mode()
def record_forest(
    target: Target,
    draft: LoadedDraft,
    inputs: dict[str, Any],
    answer: Answer,
    bounds: ForestBounds,
    reading: Reading | None = None,
    *,
    visual_ranking: VisualRanking = "text_after_image",
) -> RecordedPrompt:
    """The forest along one answer of the target to which the draft is attached. Without a ``reading`` the target is run for
    the layers that the draft reads.
    """
    tokens = np.array(answer.tokens, np.int64)
    num_roots = max(0, len(tokens) - 1)  # nothing follows the last token
    widest = bounds.width + bounds.beam + bounds.nucleus_width + 2  # most probable path and answer
    largest = widest * (bounds.depth - 1)  # forest
    most_at_once = min(MAX_STEP, max(ROOTS_AT_ONCE, NODES_AT_ONCE // max(1, largest)))
    capacity = answer.prompt_length + len(tokens) + most_at_once * largest + MAX_STEP
    draft.use_mode(EAGER)
    scores = answer.visual_scores.get(visual_ranking)
    if reading is None and draft.aux_layers:
        reading = read_target(target, inputs, answer, draft.aux_layers)
    if reading is not None:
        target.hidden = reading.prompt_hidden
    (prompt,) = draft.prompts(inputs, () if reading is None else reading.prompts)
    draft.prefill(prompt, None if scores is None else torch.tensor(scores, device=draft.device), capacity=capacity)
    grower = _ForestGrower(draft, tokens, bounds, {} if reading is None else reading.answer_hidden)
    first, num_together = 0, most_at_once
    while first < num_roots:
        end = min(first + num_together, num_roots)
        nodes_per_root = grower.grow(first, end) / (end - first)
        first, num_together = end, max(1, min(most_at_once, int(NODES_AT_ONCE / max(nodes_per_root, 1))))
    return RecordedPrompt(grower.forest(), answer.prompt_length, draft.length, answer.num_visual_tokens)


class _ForestGrower:
    """Puts the answer after the prompt in the draft's KV cache, then grows the forests of several roots at a time after it.

    The answer's tokens stay uncommitted, because a root must not see the tokens after it: the mask selects them.
    """

    def __init__(
        self, draft: LoadedDraft, tokens: Ints, bounds: ForestBounds, answer_hidden: Mapping[int, Tensor]
    ) -> None:
        self.draft = draft
        self.answer_hidden = answer_hidden
        self.tokens = tokens
        self.bounds = bounds
        self.num_roots = max(0, len(tokens) - 1)
        k = bounds.num_proposals
        self._child_token = [np.zeros((0, k), np.int64)]
        self._child_logprob = [np.zeros((0, k), np.float32)]
        self._links: list[tuple[Ints, Ints, int]] = []  # parents, ranks, first child node
        self._num_nodes = 0
        self._read_answer()

    def _evaluate(
        self, tokens: Ints, offsets: Ints, tree_mask: NDArray[np.float32], parents: Ints | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Add a forest node for each token. ``parents`` are offsets; None for the answer's own tokens."""
        source: FeatureSource
        if parents is None:
            rows = torch.from_numpy(offsets).to(self.draft.device)
            source = {layer: self.answer_hidden[layer][rows] for layer in self.draft.aux_layers}
        else:
            source = parents
        logits = self.draft.forward(Step(tokens, offsets, tree_mask), source)
        child_token, child_logprob = self.draft.best(logits, self.bounds.num_proposals)
        self._child_token.append(child_token.astype(np.int64))
        self._child_logprob.append(child_logprob)
        self._num_nodes += len(tokens)
        return self._child_token[-1], child_logprob

    def _read_answer(self) -> None:
        """Evaluate the answer's tokens, teacher-forced: the children of every root."""
        for first in range(0, self.num_roots, MAX_STEP):
            rows = np.arange(first, min(first + MAX_STEP, self.num_roots))
            tree_mask = np.where(np.arange(rows[-1] + 1) > rows[:, None], self.draft.mask_value, 0.0)
            self._evaluate(self.tokens[rows], rows, tree_mask.astype(np.float32))
        self._root_token, self._root_logprob = np.concatenate(self._child_token), np.concatenate(self._child_logprob)

    def grow(self, first: int, end: int) -> int:
        """Grow the forests of the roots ``first`` to ``end - 1``, level by level; returns their number of nodes."""
        bounds, num_roots = self.bounds, self.num_roots
        root = np.arange(first, end)
        tokens, logprobs = self._root_token[root], self._root_logprob[root]
        node, path_logprob = root.copy(), np.zeros(len(root))
        is_best, is_answer, is_nucleus = np.ones((3, len(root)), np.bool_)
        ancestors = np.full((len(root), bounds.depth), -1)  # offsets after the answer, by level
        written = 0
        for level in range(1, bounds.depth):
            following = np.minimum(root + level, len(self.tokens) - 1)
            is_following = (is_answer & (root + level < len(self.tokens)))[:, None] & (
                tokens == self.tokens[following][:, None]
            )
            is_pinned = is_following.copy()
            is_pinned[is_best, 0] = True
            mass = np.cumsum(np.exp(logprobs), axis=1)
            mass_before = mass - np.exp(logprobs)
            limit = bounds.nucleus * (mass[:, -1:] if bounds.is_renormalised else 1.0) + 1e-4
            in_nucleus = is_nucleus[:, None] & (mass_before < limit) & (level < bounds.nucleus_depth)
            row, rank = choose_expanded(
                root,
                path_logprob[:, None] + logprobs,
                is_pinned,
                in_nucleus,
                np.log(bounds.floor * level),
                bounds.width,
                bounds.beam if level < bounds.beam_depth else 0,
                bounds.nucleus_width,
            )
            self._links.append((node[row], rank, self._num_nodes))
            chosen = tokens[row, rank]
            path_logprob = path_logprob[row] + logprobs[row, rank]
            is_best, is_nucleus = is_best[row] & (rank == 0), in_nucleus[row, rank]
            is_answer = is_following[row, rank]
            root, ancestors = root[row], ancestors[row]
            node = self._num_nodes + np.arange(len(row))
            children = []
            for begin in range(0, len(row), MAX_STEP):
                part = slice(begin, min(begin + MAX_STEP, len(row)))
                offsets = written + np.arange(part.stop - part.start)
                ancestors[part, level] = offsets
                written += len(offsets)
                tree_mask = np.full((len(offsets), num_roots + written), self.draft.mask_value, np.float32)
                open_columns(tree_mask, root[part], ancestors[part, 1 : level + 1], num_roots)
                # The parent of a root's child is the answer's token of that index.
                parents = root[part] if level == 1 else num_roots + ancestors[part, level - 1]
                children.append(self._evaluate(chosen[part], root[part] + level, tree_mask, parents))
            tokens, logprobs = (np.concatenate(arrays) for arrays in zip(*children, strict=True))
        return written

    def forest(self) -> Forest:
        """All nodes; the first ``num_roots`` are the answer's own."""
        child_token, child_logprob = np.concatenate(self._child_token), np.concatenate(self._child_logprob)
        child_node = np.full(child_token.shape, -1)
        for parents, ranks, first in self._links:
            child_node[parents, ranks] = first + np.arange(len(parents))
        return Forest(self.tokens, child_token, child_logprob, child_node)
