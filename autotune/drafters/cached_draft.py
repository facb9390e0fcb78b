"""Drafts with a KV cache."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from autotune.documents.execution import round_up
from autotune.drafters.draft import AnswerToRecord, Coupling, Draft, FeatureSource, Proposals, cut_scores, top_proposals
from autotune.drafters.forests import ModelForestGrower
from autotune.modeling.cached_model import CachedModel
from autotune.modeling.graph_runner import GraphKey
from autotune.modeling.host import rows_to_host, to_device
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.step import NOISE_ROW, TEMPERATURE, TOP_K, TOP_P, Evaluated, PackedStep, Step
from autotune.replay.trace import Forest
from autotune.trees.limits import MAX_CHILDREN, MAX_LEVEL_STEP, MAX_STEP
from autotune.trees.tree import ROOT, Ints, Tree, write_level

PENDING_PIECE = 32  # pending tokens that captured steps read at once


class CachedDraft(CachedModel, Draft):
    """A draft whose cache holds the committed prefix, then the nodes evaluated in this round, in order of evaluation:
    the order that ``tree.kv_slot`` counts.

    Committed tokens that are not in the cache yet are *pending*: the new root, and before it accepted tokens whose
    nodes were not evaluated, or were evaluated without the target's features. The round's first forward pass evaluates
    them.
    """

    token_ids: Tensor | None = None  # the target's id of each token of a smaller vocabulary; None: the same ids
    least_columns = 1024  # more nodes than most rounds evaluate
    usual_pending = 8
    """Pending tokens after nearly all rounds, of captured forward passes."""
    target_vocab_size: int  # known after ``attach``

    def __init__(self) -> None:
        self._pending: list[int] = []
        self.num_proposals = MAX_CHILDREN
        """Proposals that a captured step gives each token."""
        self._num_evaluated = 0

    @abstractmethod
    def _pending_source(self) -> FeatureSource:
        """The feature source of the pending tokens."""

    @abstractmethod
    def _commit_pending(self, count: int) -> None:
        """Commit the pending tokens, which were just evaluated."""

    def prompts(self, inputs: dict[str, Any], target_prompts: Sequence[EncodedPrompt]) -> Sequence[EncodedPrompt]:
        """The target's own, which a draft of the target's features reads."""
        return target_prompts

    @torch.inference_mode()
    def forest(self, answer: AnswerToRecord) -> Forest:
        return ModelForestGrower(self, answer).grow_all()

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters, without those shared with the target."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers, once the cache is allocated."""
        return int(self.cache.memory_bytes // self.cache.capacity)

    def reserve(self, num_tokens: int) -> None:
        super().reserve(num_tokens)
        self.begin_round()

    def begin_round(self) -> None:
        """Drop the nodes evaluated in the round before."""
        self._num_evaluated = 0

    def prepare_step(self, kv_length: int, *, num_pending: int = 0, num_pruned: int = 0) -> None:
        """Begin a round after ``kv_length`` tokens, whatever they are, so that a step can be timed or captured.

        Args:
            num_pending: pending tokens.
            num_pruned: tokens of the prompt that only cross-attention blocks see.
        """
        self.cache.length = kv_length
        self._rope_delta = np.zeros(1, np.int64)
        self._pending = [0] * num_pending
        self.begin_round()

    def numbers_pruned(self, visual_keep: float) -> tuple[int, ...]:
        """Numbers of pruned tokens for which steps are captured apart, with this share of the visual tokens."""
        return (0,)

    def append(self, token: int) -> None:
        """See ``Draft``. A stretch of plain steps longer than a forward pass is read in several."""
        self._make_room_for_pending(1)
        self._append(token)

    def _make_room_for_pending(self, num_tokens: int) -> None:
        """Read the pending tokens, of plain steps or of rounds that drafted nothing, where more do not fit a forward
        pass.
        """
        limit = MAX_STEP if self.graph_runner is None else PENDING_PIECE
        if self._pending and (len(self._pending) + num_tokens > limit or self._must_read):
            self.read_pending()

    @property
    def _must_read(self) -> bool:
        """Whether the pending tokens must be read now, although they fit a forward pass."""
        return False

    def pending_size(self, count: int) -> int:
        """Number of tokens to which ``count`` pending ones are padded. All sizes above ``usual_pending`` share a
        capture.
        """
        if self.graph_runner is not None and count > self.usual_pending:
            count = max(count, PENDING_PIECE)
        return round_up(count, self.capture_sizes)

    @abstractmethod
    def _append(self, token: int) -> None:
        """Make a committed token pending."""

    def read_pending(self, size: int = 0) -> Evaluated:
        """Evaluate and commit the pending tokens, padded to ``size`` (0: the usual); the logits are those after the
        last of them, [1, vocabulary].
        """
        count = len(self._pending)
        size = size or self.pending_size(count)
        step = Step.causal(np.array(self._pending + [0] * (size - count), np.int64), self.mask_value)
        step = step._replace(offsets=np.minimum(step.offsets, count - 1), only=count - 1)
        evaluated = self.evaluate_step(step, self._pending_source())
        self._commit_pending(count)
        self._pending = []
        self.begin_round()
        return evaluated

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int, coupling: Coupling | None = None) -> Proposals:
        if len(frontier) > MAX_LEVEL_STEP:  # nodes of a level do not see each other
            parts = np.split(frontier, range(MAX_LEVEL_STEP, len(frontier), MAX_LEVEL_STEP))
            # Copied: passes of one size have one result in memory.
            found = [list(map(np.copy, self.propose(tree, part, num_proposals, coupling))) for part in parts]
            return np.concatenate([tokens for tokens, _ in found]), np.concatenate([best for _, best in found])
        draw = None if coupling is None else coupling.draw
        self.num_proposals, self.draw = num_proposals, draw if draw and draw.noise.device == self.device else None
        evaluated = self.read_pending() if frontier[0] == ROOT else self._read_level(tree, frontier)
        count = len(frontier)
        if evaluated.wait is None or (coupling is not None and self.draw is None):
            return self.best(evaluated.logits[:count], num_proposals, coupling)
        tokens, logprobs = evaluated.wait()[:, :count, :num_proposals]
        return self._finite(tokens, logprobs.view(np.float32))

    def _read_level(self, tree: Tree, frontier: Ints) -> Evaluated:
        """Evaluate nodes of one depth; the logits are those after each, [nodes and padding, vocabulary]."""
        count, begin = len(frontier), self._num_evaluated
        size = round_up(count, self.capture_sizes)
        tokens, offsets, sources = np.empty((3, size), np.int64)
        tree_mask = np.empty((size, begin + size), np.float32)
        write_level(tree, frontier, begin, self.mask_value, tokens, offsets, sources, tree_mask)
        self._num_evaluated = begin + count
        return self.evaluate_step(Step(tokens, offsets, tree_mask), sources)

    def _complete(self, key: GraphKey) -> tuple[GraphKey, list[Tensor]]:
        count = 1 if self.num_proposals == 1 else max(self.num_proposals, MAX_CHILDREN)  # few captures
        reads = [] if self.draw is None else [self.draw.noise]
        return key._replace(num_proposals=count, addresses=tuple(tensor.data_ptr() for tensor in reads)), reads

    def _result(self, key: GraphKey, step: PackedStep, logits: Tensor) -> Tensor:
        """The proposals after each token, [2, n, proposals]: tokens, and the bits of float32 log-probabilities."""
        scores = logits.float()
        if (draw := self.draw) is not None:
            temperature, top_p = step.header[TEMPERATURE : TOP_P + 1].view(torch.float64)
            noise = draw.noise.index_select(0, step.header[NOISE_ROW : NOISE_ROW + 1])
            ids = slice(logits.shape[1]) if self.token_ids is None else self.token_ids
            scores = cut_scores(scores / temperature, step.header[TOP_K], top_p) + noise[:, ids]
        tokens, logprobs = top_proposals(scores, min(key.num_proposals, scores.shape[1]))
        tokens = tokens if self.token_ids is None else self.token_ids[tokens]
        return torch.stack([tokens.int(), logprobs.view(torch.int32)])

    def best_on_device(
        self, logits: Tensor, num_proposals: int, coupling: Coupling | None = None
    ) -> tuple[Tensor, Tensor]:
        """``best``, left on the device."""
        if coupling is not None:
            return top_proposals(coupling.scores(self._in_target_vocabulary(logits)), num_proposals)
        tokens, logprobs = top_proposals(logits, num_proposals)
        return tokens if self.token_ids is None else self.token_ids[tokens], logprobs

    def best(self, logits: Tensor, num_proposals: int, coupling: Coupling | None = None) -> Proposals:
        """The best tokens of each row, as the target's ids. Rows that are not finite propose nothing: -1 and -inf."""
        return self._finite(*rows_to_host(*self.best_on_device(logits, num_proposals, coupling)))

    def _finite(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Proposals:
        if not math.isnan(logprobs.sum()):
            return tokens, logprobs
        warnings.warn(f"logits of {self.description} are not finite, and propose no tokens", stacklevel=2)
        is_bad = np.isnan(logprobs)
        return np.where(is_bad, -1, tokens), np.where(is_bad, -np.inf, logprobs)

    def _in_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [n, target's vocabulary]; -inf for the tokens that the draft does not know."""
        if self.token_ids is not None:
            everything = logits.new_full((len(logits), self.target_vocab_size), -torch.inf)
            return everything.index_copy(1, self.token_ids, logits)
        missing = self.target_vocab_size - logits.shape[1]
        return logits if missing == 0 else pad(logits, (0, missing), value=-torch.inf)


def pad_rows(states: Tensor, num_rows: int) -> Tensor:
    """Add rows of zeros up to ``num_rows``."""
    return states if len(states) == num_rows else pad(states, (0, 0, 0, num_rows - len(states)))


def table_rows(table: Tensor, indices: Ints) -> Tensor:
    """Rows of a table, [*indices, *row]; a single one, as in a chain, without a gather on the device."""
    if indices.size == 1:
        return table.narrow(0, indices.item(), 1).view(*indices.shape, *table.shape[1:])
    return table[to_device(indices, table.device)]


def as_cached(draft: Draft | None) -> CachedDraft | None:
    """The draft, if it runs forward passes over a KV cache."""
    return draft if isinstance(draft, CachedDraft) else None
