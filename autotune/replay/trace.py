"""Traces: what a draft proposes along the target's own output, recorded once and replayed under any tree policy.

For every position of every answer a trace holds a *forest node*: the draft's most probable children of that token, and,
for those children that a tree might expand, their forest nodes in turn. Decoding is lossless, so it emits the recorded
answer whatever the tree, and a draft is asked for nothing else.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autotune.documents.provenance import ModelReference, Provenance
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import Document, content_key, write_bytes
from autotune.trees.base import ForestBounds as ForestBounds
from autotune.trees.base import bounds_for as bounds_for
from autotune.trees.limits import MAX_RETRIEVED, Ints
from autotune.trees.tree import CHILD, Proposals

if TYPE_CHECKING:
    import pandas as pd


class TraceHeader(Document, kind="trace", version=2, made_by="autotune record"):
    """The JSON half of a trace."""

    provenance: Provenance
    target: ModelReference
    draft: ModelReference
    draft_kind: str
    subnet: Subnet = Field(default_factory=Subnet)
    aux_layers: tuple[int, ...] = ()
    """Layers of the target whose outputs the draft reads."""
    workload: str
    workload_sha256: str
    bounds: ForestBounds
    prompts: list[str]
    tasks: list[str]
    arrays_sha256: str = ""
    """Hash of the file of the arrays; empty in memory."""

    @property
    def file(self) -> str:
        """Path in a study folder, with the subnet and a hash of what was recorded: traces of other prompts, models or
        bounds have other files.
        """
        recorded = self.model_dump(mode="json", exclude={"provenance", "arrays_sha256"})
        return f"traces/{self.draft.id.replace('/', '-')}/{self.subnet.name}-{content_key(recorded)}.trace.json"


@dataclass(frozen=True)
class Forest:
    """The recorded proposals along one answer, or along several concatenated ones.

    ``answer`` [tokens] is the target's output. In the forest of one answer, its token i is node i, for all but the
    last. ``child_token``, ``child_logprob`` and ``child_node`` are [nodes, proposals], most probable first;
    ``child_node`` is -1 where the child was not expanded.

    ``retrieved`` [tokens, ``MAX_RETRIEVED``] is what followed the longest match of the context up to each token, -1
    where there is nothing, and ``match_length`` [tokens] the length of that match (``trees.tree.Retrieved``).
    """

    answer: Ints
    child_token: Ints
    child_logprob: NDArray[np.float32]
    child_node: Ints
    retrieved: Ints = field(default_factory=lambda: np.zeros((0, MAX_RETRIEVED), np.int64))
    match_length: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if len(self.match_length) < len(self.answer):  # nothing was retrieved
            object.__setattr__(self, "match_length", np.zeros(len(self.answer), np.int64))
            object.__setattr__(self, "retrieved", np.full((len(self.answer), MAX_RETRIEVED), -1))


@dataclass(frozen=True)
class Trace:
    """The trace of one target, draft subnet and workload. Arrays of all prompts are concatenated: prompt p has answer
    tokens ``answer[answer_start[p] : answer_start[p + 1]]``, the first of which is forest node ``first_node[p]``.
    """

    header: TraceHeader
    forest: Forest
    answer_start: Ints
    first_node: Ints
    prompt_length: Ints
    """Tokens in the target's KV cache when decoding begins."""
    draft_prompt_length: Ints
    """Tokens in the draft's KV cache, without pruned visual tokens."""
    num_visual_tokens: Ints
    """Image tokens of the prompt, before pruning."""
    num_patches: Ints
    """Patches that a vision tower reads of the prompt's images and videos (``modeling.prompt.num_patches``)."""

    @functools.cached_property
    def packed(self) -> PackedForest:
        return pack_trace(self)

    @property
    def answers(self) -> list[list[int]]:
        """The tokens of every answer."""
        return [answer.tolist() for answer in np.split(self.forest.answer, self.answer_start[1:-1])]

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_length)

    @property
    def num_tokens(self) -> int:
        """Tokens that decoding emits after the first ones, which the prefills emit."""
        return int(len(self.forest.answer) - self.num_prompts)

    def select(self, prompts: Sequence[int] | Ints) -> Trace:
        """The trace of the prompts with these indices, in their order."""
        header, ends = self.header, [*self.first_node[1:], len(self.forest.child_token)]
        parts = []
        for p in prompts:
            first, nodes = self.first_node[p], slice(self.first_node[p], ends[p])
            child_node = self.forest.child_node[nodes]
            answer = slice(self.answer_start[p], self.answer_start[p + 1])
            forest = Forest(
                self.forest.answer[answer],
                self.forest.child_token[nodes],
                self.forest.child_logprob[nodes],
                np.where(child_node >= 0, child_node - first, -1),
                self.forest.retrieved[answer],
                self.forest.match_length[answer],
            )
            numbers = {name: int(getattr(self, name)[p]) for name in PER_PROMPT}
            parts.append(RecordedPrompt(forest, **numbers))
        names, tasks = ([values[p] for p in prompts] for values in (header.prompts, header.tasks))
        return join(header.model_copy(update={"prompts": names, "tasks": tasks}), parts)

    def draft_kv_length(self, crossing_share: float) -> Ints:
        """KV length [prompts] at which a draft's forward passes are priced when decoding begins.

        Blocks that cross (DREAM, STAR) attend to the whole prompt and the others to what pruning left. What attention
        costs is proportional to the keys and values that it reads, so the price of both is the price of a draft without
        pruning at their mean, weighted by the ``crossing_share`` of the keys and values of a token.
        """
        num_pruned = self.prompt_length - self.draft_prompt_length
        return np.round(self.draft_prompt_length + crossing_share * num_pruned).astype(np.int64)

    def roots(self) -> tuple[Ints, Ints, Ints]:
        """Prompt, index in ``forest.answer`` and forest node of every answer token but the last of each answer."""
        lengths = np.diff(self.answer_start)
        prompt = np.repeat(np.arange(self.num_prompts), lengths - 1)
        token = np.delete(np.arange(len(self.forest.answer)), self.answer_start[1:] - 1)
        return prompt, token, self.first_node[prompt] + token - self.answer_start[prompt]

    def agreement(self, ranks: Sequence[int] = (1, 4)) -> pd.DataFrame:
        """How often the draft, given the true prefix, has the target's next token among its ``rank`` most probable
        ones.

        Columns: task, rank, share. A task whose answers have one token each has no rows.
        """
        import pandas as pd

        prompt, token, node = self.roots()
        is_next = self.forest.child_token[node] == self.forest.answer[token + 1][:, None]
        hits = pd.DataFrame({rank: is_next[:, :rank].any(1) for rank in ranks})
        hits["task"] = np.array(self.header.tasks)[prompt]
        shares = hits.melt("task", var_name="rank", value_name="share").astype({"rank": int, "share": float})
        return shares.groupby(["task", "rank"], sort=False, as_index=False).mean()


NUM_HOT = 16


class PackedForest(NamedTuple):
    """A forest laid out for replay, so that what a round reads is contiguous in memory.

    Rows of ``proposals`` are forest nodes: first the NUM_HOT most probable nodes of every root, root by root, because
    every policy reads these and replay is bound by memory latency; then the others. The last row, ``unrecorded``, is
    that of every node not recorded and proposes nothing. ``root_row`` [answer tokens] is the row of each token.
    """

    proposals: Proposals
    root_row: NDArray[np.int32]

    @property
    def unrecorded(self) -> int:
        return len(self.proposals) - 1


def pack_trace(trace: Trace) -> PackedForest:
    forest = trace.forest
    num_nodes, k = forest.child_token.shape
    # The answer token that every node descends from, and its cumulative log-probability, level by level.
    _, root_token, roots = trace.roots()
    owner, logprob = np.full(num_nodes, -1), np.zeros(num_nodes, np.float32)
    level, owner[roots] = roots, root_token
    while len(level):
        children = forest.child_node[level]
        is_recorded = children >= 0
        owner[children[is_recorded]] = np.repeat(owner[level], is_recorded.sum(1))
        logprob[children[is_recorded]] = (logprob[level][:, None] + forest.child_logprob[level])[is_recorded]
        level = children[is_recorded]
    order = np.lexsort((-logprob, owner))
    index_in_root = np.arange(num_nodes) - np.searchsorted(owner[order], owner[order])
    order = order[np.argsort(index_in_root >= NUM_HOT, kind="stable")]
    row = np.empty(num_nodes + 1, np.int32)
    row[order] = np.arange(num_nodes)
    row[-1] = num_nodes  # child_node -1
    proposals = np.empty((num_nodes + 1, k), CHILD)
    proposals[-1] = (-np.inf, 0.0, -1, num_nodes)
    proposals["token"][:-1], proposals["logprob"][:-1] = forest.child_token[order], forest.child_logprob[order]
    proposals["probability"][:-1] = np.exp(forest.child_logprob[order])
    proposals["row"][:-1] = row[forest.child_node[order]]
    root_row = np.full(len(forest.answer), num_nodes, np.int32)
    root_row[root_token] = row[roots]
    return PackedForest(proposals, root_row)


class RecordedPrompt(NamedTuple):
    """The trace of one prompt; lengths as in ``Trace``."""

    forest: Forest
    prompt_length: int
    draft_prompt_length: int
    num_visual_tokens: int
    num_patches: int = 0


PER_PROMPT = ("prompt_length", "draft_prompt_length", "num_visual_tokens", "num_patches")
"""Names of the numbers of a prompt, in their order in ``RecordedPrompt``."""


def join(header: TraceHeader, parts: list[RecordedPrompt]) -> Trace:
    """Concatenate prompts to one trace."""
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
            np.concatenate([f.retrieved for f in forests]).astype(np.int64),
            np.concatenate([f.match_length for f in forests]).astype(np.int64),
        ),
        answer_start=np.concatenate([[0], np.cumsum([len(f.answer) for f in forests])]).astype(np.int64),
        first_node=first_node.astype(np.int64),
        **{name: np.array([getattr(part, name) for part in parts], np.int64) for name in PER_PROMPT},
    )


_ARRAYS = ("answer_start", "first_node", *PER_PROMPT)
FOREST = tuple(entry.name for entry in fields(Forest))
"""Names of the arrays of a forest."""


def save_trace(path: Path, trace: Trace) -> None:
    """Write the header to ``path``, as JSON, and the arrays into a safetensors file next to it."""
    from safetensors.numpy import save

    arrays: dict[str, Any] = {name: getattr(trace, name) for name in _ARRAYS}
    arrays |= {name: getattr(trace.forest, name) for name in FOREST}
    # Tokens and nodes fit in 32 bits.
    small = {
        name: np.ascontiguousarray(a if a.dtype == np.float32 else a.astype(np.int32)) for name, a in arrays.items()
    }
    content = save(small)
    write_bytes(path.with_suffix(".safetensors"), content)
    trace.header.model_copy(update={"arrays_sha256": hashlib.sha256(content).hexdigest()}).save(path)


def load_trace(path: Path) -> Trace:
    """Read the trace whose header is ``path``.

    Raises:
        UserError: there is no such trace, or its arrays are missing, or not those that were written with the header.
    """
    from safetensors.numpy import load

    header, arrays_path = TraceHeader.load(path), path.with_suffix(".safetensors")
    content = arrays_path.read_bytes() if arrays_path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != header.arrays_sha256:
        raise UserError(
            f"{arrays_path}: the arrays are not those that were written with {path.name}; record the trace again with "
            "autotune record"
        )
    arrays = load(content)
    wide = {name: array if array.dtype == np.float32 else array.astype(np.int64) for name, array in arrays.items()}
    return Trace(
        header.model_copy(update={"arrays_sha256": ""}),
        Forest(*(wide[name] for name in FOREST)),
        *(wide[name] for name in _ARRAYS),
    )
