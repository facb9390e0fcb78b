"""What a draft proposes along the target's own output: recorded once, replayed under any tree policy.

For every position of every answer the trace holds a *forest node*: the draft's most probable children of that token,
and, for those children that a tree might expand, their forest nodes in turn. Losslessness fixes the answer, so nothing
else is ever asked of a draft that decodes these prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autotune.errors import UserError
from autotune.files import Document, parse, read_json, write_bytes, write_document
from autotune.provenance import ModelReference, Provenance
from autotune.trees.tree import Ints


class ForestBounds(Document):
    """How far the forest reaches. A node is recorded if its level and its share of probability allow it, or if it is on
    the path of most probable tokens or on the answer itself: those two are recorded whatever their probability, so that
    accepted lengths are exact for every tree whose node budget does not bind, and for every tree at all that asks for no
    node outside (``Replay.missing``).
    """

    depth: int = Field(default=12, ge=1, le=24)
    """Deepest level of children."""
    num_proposals: int = Field(default=10, ge=1, le=32)
    """Children of a node."""
    floor: float = Field(default=0.1 / 12, gt=0, lt=1)
    """A node of level l is expanded if its cumulative probability exceeds ``floor * l``: SAGE's threshold at the
    deepest tree.
    """
    width: int = Field(default=16, ge=1, le=128)
    """Most nodes of one level that are expanded."""


class TraceHeader(Document):
    """The JSON half of a trace."""

    provenance: Provenance
    target: ModelReference
    draft: ModelReference
    visual_keep: float
    workload: str
    workload_sha256: str
    bounds: ForestBounds
    prompts: list[str]
    tasks: list[str]


@dataclass(frozen=True)
class Forest:
    """The recorded part of one answer, or of many laid end to end.

    ``answer`` [tokens] is the target's output; token i of it is forest node i of its answer, for all but the last.
    ``child_token``, ``child_logprob`` and ``child_node`` are [nodes, proposals], most probable first; ``child_node`` is
    -1 where the child was not expanded.
    """

    answer: Ints
    child_token: Ints
    child_logprob: NDArray[np.float32]
    child_node: Ints


@dataclass(frozen=True)
class Trace:
    """A recorded (target, draft subnet, workload). Arrays of all prompts end to end; prompt p has answer tokens
    ``answer[answer_start[p] : answer_start[p + 1]]``, and its first token is forest node ``first_node[p]``.
    """

    header: TraceHeader
    forest: Forest
    answer_start: Ints
    first_node: Ints
    prompt_length: Ints
    """Tokens in the target's cache when decoding begins."""
    draft_prompt_length: Ints
    """Tokens in the draft's cache: pruned visual tokens are missing."""
    num_visual_tokens: Ints
    """Image tokens of the prompt, before pruning."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_length)

    @property
    def num_tokens(self) -> int:
        """Tokens that decoding emits after the prefill's first ones."""
        return int(len(self.forest.answer) - self.num_prompts)


class RecordedPrompt(NamedTuple):
    """The trace of one prompt: the forest, and the prompt's lengths as ``Trace`` has them."""

    forest: Forest
    prompt_length: int
    draft_prompt_length: int
    num_visual_tokens: int


def join(header: TraceHeader, parts: list[RecordedPrompt]) -> Trace:
    """One trace of several prompts."""
    forests = [part.forest for part in parts]
    node_counts = np.array([len(forest.child_token) for forest in forests])
    first_node = np.concatenate([[0], np.cumsum(node_counts)[:-1]])
    shifted = [
        np.where(f.child_node >= 0, f.child_node + first, -1) for f, first in zip(forests, first_node, strict=True)
    ]
    return Trace(
        header,
        Forest(
            np.concatenate([f.answer for f in forests]).astype(np.int64),
            np.concatenate([f.child_token for f in forests]).astype(np.int64),
            np.concatenate([f.child_logprob for f in forests]).astype(np.float32),
            np.concatenate(shifted).astype(np.int64),
        ),
        answer_start=np.concatenate([[0], np.cumsum([len(f.answer) for f in forests])]).astype(np.int64),
        first_node=first_node.astype(np.int64),
        prompt_length=np.array([part.prompt_length for part in parts], np.int64),
        draft_prompt_length=np.array([part.draft_prompt_length for part in parts], np.int64),
        num_visual_tokens=np.array([part.num_visual_tokens for part in parts], np.int64),
    )


_ARRAYS = ("answer_start", "first_node", "prompt_length", "draft_prompt_length", "num_visual_tokens")
_FOREST = ("answer", "child_token", "child_logprob", "child_node")


def save_trace(path: Path, trace: Trace) -> None:
    """Write ``path`` (the JSON header) and, beside it, the arrays as safetensors."""
    from safetensors.numpy import save

    arrays: dict[str, Any] = {name: getattr(trace, name) for name in _ARRAYS}
    arrays |= {name: getattr(trace.forest, name) for name in _FOREST}
    # Half the bytes: tokens and nodes fit 32 bits.
    small = {
        name: np.ascontiguousarray(a if a.dtype == np.float32 else a.astype(np.int32)) for name, a in arrays.items()
    }
    write_bytes(path.with_suffix(".safetensors"), save(small))
    write_document(path, "trace", trace.header)


def load_trace(path: Path) -> Trace:
    """The trace whose header is ``path``.

    Raises:
        UserError: no such trace, or its arrays are missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    header = parse(TraceHeader, "trace", read_json(path), source=path)
    arrays_path = path.with_suffix(".safetensors")
    try:
        arrays = load(arrays_path.read_bytes())
        wide = {name: array if array.dtype == np.float32 else array.astype(np.int64) for name, array in arrays.items()}
        return Trace(header, Forest(*(wide[name] for name in _FOREST)), *(wide[name] for name in _ARRAYS))
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"{arrays_path}: the trace's arrays cannot be read ({error}); record it again with autotune record"
        ) from None


def agreement(trace: Trace, ranks: tuple[int, ...] = (1, 4)) -> dict[str, dict[int, float]]:
    """By task: the share of answer tokens that are among the draft's ``rank`` most probable, after the true prefix."""
    found: dict[str, list[NDArray[np.int64]]] = {}
    for p, task in enumerate(trace.header.tasks):
        begin, end = int(trace.answer_start[p]), int(trace.answer_start[p + 1])
        following = trace.forest.answer[begin + 1 : end]
        nodes = int(trace.first_node[p]) + np.arange(len(following))
        is_it = trace.forest.child_token[nodes] == following[:, None]
        found.setdefault(task, []).append(np.where(is_it.any(1), is_it.argmax(1), 1 << 30))
    pooled = {task: np.concatenate(places) for task, places in found.items()}
    return {task: {rank: float((p < rank).mean()) for rank in ranks} for task, p in pooled.items() if len(p)}
