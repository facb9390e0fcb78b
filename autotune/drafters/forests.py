"""Forests: what a draft proposes from every position of an answer, grown for several positions together, level by
level.

A draft with recurrent or convolution states follows one path, so that its chains are recorded one position at a time,
in the forward passes of decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from autotune.drafters.draft import NODES_AT_ONCE, AnswerToRecord, FeatureSource
from autotune.modeling.step import Step
from autotune.replay.trace import Forest
from autotune.trees.limits import MAX_STEP, Floats, Ints

NOT_EVALUATED = -1


class _Evaluated:
    """The tokens that the draft has evaluated, and what it proposes after them. The first ones are the answer's own.

    The arrays have room for further tokens.
    """

    def __init__(self, num_proposals: int, num_levels: int) -> None:
        self.size = 0
        self.child_token = np.zeros((0, num_proposals), np.int64)
        self.child_logprob = np.zeros((0, num_proposals), np.float32)
        self.child = np.zeros((0, num_proposals), np.int64)
        """The index at which a child is evaluated itself, or ``NOT_EVALUATED``."""
        self.last_answer = np.zeros(0, np.int64)
        """Index of the last token of the answer that a token sees."""
        self.ancestors = np.zeros((0, num_levels), np.int64)
        """Offsets, after the answer, of the drafted tokens that a token sees, itself included; -1 beyond."""
        self.num_drafted = np.zeros(0, np.int64)
        """Number of those tokens."""

    def add(
        self, tokens: Ints, logprobs: NDArray[np.float32], last_answer: Ints, ancestors: Ints | None = None
    ) -> None:
        begin, end = self.size, self.size + len(tokens)
        if end > len(self.child_token):
            for name in ("child_token", "child_logprob", "child", "last_answer", "ancestors", "num_drafted"):
                old = getattr(self, name)
                new = np.empty((max(2 * end, 1024), *old.shape[1:]), old.dtype)
                new[:begin] = old[:begin]
                setattr(self, name, new)
        self.child_token[begin:end], self.child_logprob[begin:end] = tokens, logprobs
        self.child[begin:end] = NOT_EVALUATED
        self.last_answer[begin:end] = last_answer
        self.ancestors[begin:end] = -1 if ancestors is None else ancestors
        self.num_drafted[begin:end] = (self.ancestors[begin:end] >= 0).sum(1)
        self.size = end


class ForestGrower(ABC):
    """Grows the forests of all roots: the tokens of the answer that others follow.

    Args:
        num_levels: levels of drafted tokens of which ``_Evaluated`` keeps the ancestors.
    """

    def __init__(self, answer: AnswerToRecord, *, num_levels: int = 0) -> None:
        self.answer, self.tokens, self.bounds = answer, answer.tokens, answer.bounds
        self.num_roots = max(0, len(answer.tokens) - 1)  # nothing follows the last token
        self.evaluated = _Evaluated(answer.bounds.num_proposals, num_levels)
        self._nodes = [np.arange(self.num_roots)]  # where every node of the forest is evaluated
        self._links: list[tuple[Ints, Ints, int]] = []  # parents, ranks, first child node
        self._num_nodes = self.num_roots

    @abstractmethod
    def grow(self, first: int, end: int) -> int:
        """Grow the forests of the roots ``first`` to ``end - 1``; returns the number of tokens evaluated."""

    def num_together(self, nodes_per_root: float | None) -> int:
        """The number of roots whose forests grow together, by default all of them.

        Args:
            nodes_per_root: tokens evaluated for each of the roots before; None at the beginning.
        """
        return self.num_roots

    @torch.inference_mode()
    def grow_all(self) -> Forest:
        """The forests of all roots, which are the first ``num_roots`` nodes."""
        first, nodes_per_root = 0, None
        while first < self.num_roots:
            end = min(first + self.num_together(nodes_per_root), self.num_roots)
            nodes_per_root = self.grow(first, end) / (end - first)
            first = end
        nodes = np.concatenate(self._nodes)
        child_node = np.full((len(nodes), self.bounds.num_proposals), -1)
        for parents, ranks, first_child in self._links:
            child_node[parents, ranks] = first_child + np.arange(len(parents))
        return Forest(self.tokens, self.evaluated.child_token[nodes], self.evaluated.child_logprob[nodes], child_node)

    def _add_nodes(self, parents: Ints, ranks: Ints, at: Ints) -> Ints:
        """Add children of nodes, which are evaluated at ``at``; returns their numbers."""
        self._links.append((parents, ranks, self._num_nodes))
        self._nodes.append(at)
        self._num_nodes += len(at)
        return np.arange(self._num_nodes - len(at), self._num_nodes)


class LevelForestGrower(ForestGrower):
    """Grows the forests of several roots at a time, level by level."""

    @abstractmethod
    def _evaluate_children(self, parents: Ints, ranks: Ints, num_before: int) -> Ints:
        """Evaluate the children of ``parents``, except those that are; returns the index of each.

        Args:
            num_before: number of tokens evaluated before this block of roots.
        """

    def _forget_block(self) -> None:
        """Begin a block of roots: no child is evaluated."""
        self.evaluated.child[: self.evaluated.size] = NOT_EVALUATED

    def grow(self, first: int, end: int) -> int:
        bounds, evaluated = self.bounds, self.evaluated
        self._forget_block()
        root = np.arange(first, end)
        at, node, path_logprob = root.copy(), root.copy(), np.zeros(len(root))
        is_best, is_answer, is_nucleus = np.ones((3, len(root)), np.bool_)
        num_before = evaluated.size
        for level in range(1, bounds.depth):
            tokens, logprobs = evaluated.child_token[at], evaluated.child_logprob[at]
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
            parents = node[row]
            path_logprob = path_logprob[row] + logprobs[row, rank]
            is_best, is_nucleus = is_best[row] & (rank == 0), in_nucleus[row, rank]
            is_answer, root = is_following[row, rank], root[row]
            at = self._evaluate_children(at[row], rank, num_before)
            node = self._add_nodes(parents, rank, at)
        return evaluated.size - num_before


class ModelForestGrower(LevelForestGrower):
    """Puts the answer after the prompt in the draft's KV cache, then grows forests after it.

    The answer's tokens stay uncommitted, because a root must not see the tokens after it: the mask selects them.

    What a draft without features proposes depends on the tokens before it only. A child that continues the answer is
    therefore the answer's own next token, and a token that several roots reach is evaluated for the first of them only.

    Args:
        draft: a ``CachedDraft`` that has evaluated the prompt.
    """

    def __init__(self, draft: Any, answer: AnswerToRecord) -> None:
        super().__init__(answer, num_levels=answer.bounds.depth)
        self.draft = draft
        self._read_answer()

    def num_together(self, nodes_per_root: float | None) -> int:
        """See ``ForestGrower``: at first ``most_roots``, then as many as have ``NODES_AT_ONCE`` nodes."""
        if nodes_per_root is None:
            return self.answer.most_roots
        return max(1, min(self.answer.most_roots, int(NODES_AT_ONCE / max(nodes_per_root, 1))))

    def _propose(self, step: Step, source: FeatureSource) -> tuple[Ints, NDArray[np.float32]]:
        coupling = self.answer.coupling(step.offsets + 1)  # of the children
        tokens, logprobs = self.draft.best(self.draft.forward(step, source), self.bounds.num_proposals, coupling)
        return tokens.astype(np.int64), logprobs

    def _read_answer(self) -> None:
        """Evaluate the answer's tokens, teacher-forced: the children of every root."""
        for first in range(0, self.num_roots, MAX_STEP):
            rows = np.arange(first, min(first + MAX_STEP, self.num_roots))
            tree_mask = np.where(np.arange(rows[-1] + 1) > rows[:, None], self.draft.mask_value, 0.0)
            at = torch.from_numpy(rows).to(self.draft.device)
            source = {layer: self.answer.hidden[layer][at] for layer in self.draft.aux_layers}
            proposed = self._propose(Step(self.tokens[rows], rows, tree_mask.astype(np.float32)), source)
            self.evaluated.add(*proposed, rows)

    def _forget_block(self) -> None:
        """Begin a block of roots, whose tokens take the place of those of the block before in the KV cache."""
        super()._forget_block()
        evaluated = self.evaluated
        if self.answer.shares_tokens:
            before = np.arange(self.num_roots - 1)
            continues = evaluated.child_token[before] == self.tokens[before + 1][:, None]
            token, rank = continues.nonzero()
            evaluated.child[token, rank] = token + 1

    def _evaluate_children(self, parents: Ints, ranks: Ints, num_before: int) -> Ints:
        evaluated = self.evaluated
        is_new = evaluated.child[parents, ranks] == NOT_EVALUATED
        keys = np.unique(parents[is_new] * self.bounds.num_proposals + ranks[is_new])
        for first in range(0, len(keys), MAX_STEP):
            part, part_ranks = np.divmod(keys[first : first + MAX_STEP], self.bounds.num_proposals)
            offsets = evaluated.size - num_before + np.arange(len(part))
            ancestors, last_answer = evaluated.ancestors[part], evaluated.last_answer[part]
            num_drafted = evaluated.num_drafted[part]
            rows = np.arange(len(part))
            # The parent of the first drafted token is the answer's token of that index.
            sources = np.where(num_drafted == 0, last_answer, self.num_roots + ancestors[rows, num_drafted - 1])
            ancestors[rows, num_drafted] = offsets
            tree_mask = np.full((len(part), self.num_roots + offsets[-1] + 1), self.draft.mask_value, np.float32)
            open_columns(tree_mask, last_answer, ancestors, self.num_roots)
            step = Step(evaluated.child_token[part, part_ranks], last_answer + num_drafted + 1, tree_mask)
            evaluated.child[part, part_ranks] = evaluated.size + rows
            evaluated.add(*self._propose(step, sources), last_answer, ancestors)
        return evaluated.child[parents, ranks]


@njit(cache=True)
def choose_expanded(
    root: Ints,
    logprob: Floats,
    is_pinned: NDArray[np.bool_],
    in_nucleus: NDArray[np.bool_],
    log_floor: float,
    width: int,
    beam: int,
    nucleus_width: int,
) -> tuple[Ints, Ints]:
    """The children that ``ForestBounds`` expands at this level, as (frontier row, rank).

    ``logprob`` [rows, proposals] is cumulative. The rows of a root are contiguous. What has no probability is not
    expanded.
    """
    num_rows, k = logprob.shape
    rows = np.empty(num_rows * k, np.int64)
    ranks = np.empty(num_rows * k, np.int64)
    count = 0
    begin = 0
    while begin < num_rows:
        end = begin
        while end < num_rows and root[end] == root[begin]:
            end += 1
        order = np.argsort(-logprob[begin:end].copy().reshape(-1), kind="mergesort")
        num_nucleus = 0
        for i in range(len(order)):
            row, rank = begin + order[i] // k, order[i] % k
            if logprob[row, rank] == -np.inf:
                break
            is_chosen = i < beam or (i < width and logprob[row, rank] > log_floor)
            if in_nucleus[row, rank] and num_nucleus < nucleus_width:
                num_nucleus += 1
                is_chosen = True
            if is_chosen or is_pinned[row, rank]:
                rows[count], ranks[count] = row, rank
                count += 1
        begin = end
    return rows[:count], ranks[:count]


@njit(cache=True)
def open_columns(tree_mask: NDArray[np.float32], last_answer: Ints, ancestors: Ints, num_roots: int) -> None:
    """Unmask for each token the answer up to ``last_answer``, its ancestors and itself (``ancestors``; -1: none)."""
    for row in range(len(last_answer)):
        tree_mask[row, : last_answer[row] + 1] = 0.0
        for offset in ancestors[row]:
            if offset >= 0:
                tree_mask[row, num_roots + offset] = 0.0


BEST = np.zeros(1, np.int64)  # rank


class PathForestGrower(ForestGrower):
    """The forest of one answer. A root whose best child is the answer's next token shares the chain of the next root.

    Args:
        draft: a ``CachedDraft`` that has evaluated the prompt.
    """

    def __init__(self, draft: Any, answer: AnswerToRecord) -> None:
        super().__init__(answer)
        self.draft = draft
        shape, roots = (self.num_roots, self.bounds.num_proposals), np.arange(self.num_roots)
        self.evaluated.add(np.zeros(shape, np.int64), np.zeros(shape, np.float32), roots)  # later, by ``grow``

    def grow(self, first: int, end: int) -> int:
        """See ``ForestGrower``. The first child of a node is expanded."""
        evaluated, before = self.evaluated, self.evaluated.size
        for root in range(first, end):
            tokens, logprobs = self._propose(int(self.tokens[root]), root, 0)
            self.draft.cache.advance(1)
            evaluated.child_token[root], evaluated.child_logprob[root] = tokens, logprobs
            node, best = np.array([root]), int(tokens[0])
            if root + 1 < self.num_roots and best == self.tokens[root + 1]:
                self._links.append((node, BEST, root + 1))
                continue
            for level in range(1, self.bounds.depth):
                tokens, logprobs = self._propose(best, root, level)
                at = np.array([evaluated.size])
                evaluated.add(tokens[None], logprobs[None], np.array([root]))
                node, best = self._add_nodes(node, BEST, at), int(tokens[0])
            self.draft.cache.keep([])
        return end - first + evaluated.size - before

    def _propose(self, token: int, root: int, level: int) -> tuple[Ints, NDArray[np.float32]]:
        """Evaluate a token of a root's chain after those of the levels before; returns its best children and their
        log-probabilities.
        """
        num_before = max(0, level - 1)  # the root itself is committed
        step = Step(np.array([token]), np.array([num_before]), np.zeros((1, num_before + 1), np.float32))
        coupling = self.answer.coupling(np.array([root + level + 1]))  # of the children
        tokens, logprobs = self.draft.best(self.draft.forward(step), self.bounds.num_proposals, coupling)
        return tokens[0].astype(np.int64), logprobs[0]
