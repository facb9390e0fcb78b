"""A round of any draft, tree policy and verification: the host grows the tree, the device runs the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from autotune.documents.execution import round_up
from autotune.drafters.draft import Draft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.modeling.host import host_ms, now_ms, select
from autotune.modeling.step import NOT_FINITE, Step
from autotune.modeling.target import Target
from autotune.runtime.generate_args import Request
from autotune.runtime.points import LoadedPoint
from autotune.runtime.token_sampler import TokenSampler, candidate_logprobs, not_finite
from autotune.trees.policy import NOTHING
from autotune.trees.tree import MAX_STEP, ROOT, Ints, Retrieved, Tree, write_tree_mask
from autotune.trees.verification import WetapVerification, accept_by_ratio, accept_path, find_child


class Round:
    """A round or a plain step of any request, in buffers that all requests of a decoder share.

    Every level and every verification ends with a transfer to the host, so its time needs no other synchronization.
    """

    def __init__(self, target: Target, mode: str, capture_sizes: Sequence[int]) -> None:
        self.target = target
        self.mode = mode  # of all forward passes after the prefill
        self.capture_sizes = capture_sizes
        self.retrieval = RetrievalDraft()
        """The retrieval of trees that use it, which follows the tokens of one request."""
        self.decides_at_once = target.device.type != "cpu"
        """Whether the tokens of all nodes are computed together, for one transfer; else those of visited nodes only."""
        self._path = np.zeros(MAX_STEP, np.int64)
        self._tree_mask = np.zeros((MAX_STEP, MAX_STEP), np.float32)

    def run(self, request: Request, point: LoadedPoint, retrieved: Retrieved = NOTHING) -> tuple[Ints, int, int]:
        """Draft, verify, accept, commit. ``retrieved`` follows the longest match, for trees with retrieval.

        Returns:
            The accepted nodes of the tree, which is in the point's grower; the target's own token after them; and the
            number of draft levels.
        """
        assert point.draft is not None
        num_levels = self._grow_tree(request, point.draft, point, retrieved)
        path, next_token = self.verify(request, point)
        self.keep(request, [ROOT, *path.tolist()])
        point.draft.commit(point.grower.tree, path, next_token)
        return path, next_token, num_levels

    def plain_step(self, request: Request) -> int:
        """One autoregressive step through the same model, cache and sampler as rounds."""
        started = host_ms()
        evaluated = self.target.evaluate_step(Step.single(request.tokens[-1]))
        self.target.cache.advance(1)
        token = request.sampler.token(evaluated.logits[0], self.target.length, evaluated)
        request.stats.verify_ms += host_ms() - started
        return token

    def _grow_tree(self, request: Request, draft: Draft, point: LoadedPoint, retrieved: Retrieved) -> int:
        """Draft a tree level by level: the draft proposes, the tree policy chooses. Returns the number of levels."""
        grower, sampler, coupling = point.grower, point.coupling_sampler(request.sampler), None
        num_levels = 0
        grower.set_root(request.tokens[-1], self.target.length, retrieved)
        self._draw_ahead(request, point, 0)
        while len(grower.frontier):
            started = host_ms()
            if sampler is not None:
                depth = grower.tree.depth[grower.frontier[:1]] + 1  # of the children
                coupling = sampler.coupling(self.target.length + depth)
            tokens, logprobs = draft.propose(grower.tree, grower.frontier, grower.policy.size.proposals, coupling)
            request.stats.draft_ms += host_ms() - started
            grower.grow(tokens, logprobs)
            num_levels += 1
        grower.prune()
        return num_levels

    def _draw_ahead(self, request: Request, point: LoadedPoint, num_accepted: int) -> None:
        """Draw the noise that the levels of a round can read, after so many tokens are accepted in the round before."""
        sampler = point.coupling_sampler(request.sampler)
        if sampler is not None and self.target.graph_runner is not None:
            first = self.target.length + 1
            sampler.draw_ahead(self.target.noise, first, first + num_accepted + point.policy.size.depth)

    def verify(self, request: Request, point: LoadedPoint) -> tuple[Ints, int]:
        """Run the target over root and tree in one forward pass; returns the accepted nodes and the target's token
        after the last of them.
        """
        tree, sampler = point.grower.tree, request.sampler
        count = int(tree.size[0])
        size = round_up(count, self.capture_sizes)
        tree_mask = self._tree_mask[:size, :size]
        write_tree_mask(tree, tree_mask, self.target.mask_value)
        started = host_ms()
        nodes, offsets = np.zeros(size, np.int64), np.zeros(size, np.int64)
        nodes[:count] = np.maximum(tree.token[:count], 0)
        offsets[:count] = tree.depth[:count]
        step = Step(nodes, offsets, tree_mask)
        evaluated = self.target.evaluate_step(step)
        self._draw_ahead(request, point, int(offsets[count - 1]) + 1)  # while the device runs the step
        logits = evaluated.logits[:count]
        positions = self.target.length + offsets[:count] + 1
        paths = self.target.paths(step)[:count] if sampler.reads_prefix else None
        if isinstance(verification := point.verification, WetapVerification):
            scores = sampler.scores(logits, positions, paths)
            logprobs = candidate_logprobs(logits, scores, tree.parent[1:count], nodes[1:count])
            num_accepted = accept_by_ratio(tree, logprobs, np.log(verification.threshold), self._path)
            path = self._path[:num_accepted].copy()
            last = int(path[-1]) if num_accepted else ROOT
            if num_accepted and paths is not None:
                sampler.append(select(paths[last], path, 0))
            token = sampler.token(logits[last], int(positions[last]))
        elif self.decides_at_once and not sampler.one_by_one:
            tokens = (
                evaluated.greedy_tokens()[:count] if sampler.is_greedy else sampler.tokens(logits, positions, paths)
            )
            path = self._path[: accept_path(tree, tokens, self._path)].copy()
            last = int(path[-1]) if len(path) else ROOT
            token = int(tokens[last])
            if token == NOT_FINITE:
                raise not_finite(int(positions[last]), logits.dtype)
            if paths is not None:
                sampler.append(select(sampler.decided, np.array([ROOT, *path]), 0))
        else:
            path, token = self._accept_row_by_row(logits, positions, sampler, tree)
        request.stats.verify_ms += host_ms() - started
        return path, token

    def keep(self, request: Request, nodes: list[int]) -> None:
        """Commit the root and accepted nodes to the target's cache. A target with states may read them again, which
        counts as a part of the verification.
        """
        if not self.target.has_states:
            self.target.cache.keep(nodes)
            return
        started = now_ms(self.target.device)
        self.target.cache.keep(nodes)
        request.stats.verify_ms += now_ms(self.target.device) - started

    def _accept_row_by_row(
        self, logits: Tensor, positions: Ints, sampler: TokenSampler, tree: Tree
    ) -> tuple[Ints, int]:
        """Lossless acceptance that computes tokens for the visited nodes only, because a token costs time in proportion
        to the vocabulary, and some logits processors need the prefix of a node as it is.
        """
        node = ROOT
        path: list[int] = []
        while True:
            token = sampler.token(logits[node], int(positions[node]))
            child = find_child(tree, node, token)
            if child < 0:
                return np.array(path, np.int64), token
            path.append(child)
            node = child
