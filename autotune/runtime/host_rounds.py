"""A round that the host leads: it hears what each level proposes, and decides what is read next. Any draft, tree and
verification; what rounds on the device are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autotune.drafters.draft import Draft
from autotune.execution import round_up
from autotune.modeling.clock import now_ms
from autotune.modeling.target import Target
from autotune.runtime.points import LoadedPoint
from autotune.runtime.request import Request
from autotune.trees.policy import TreeGrower
from autotune.trees.tree import MAX_STEP, ROOT, Ints, Tree, write_tree_mask
from autotune.trees.verification import WetapVerification, accept_by_ratio, accept_path, find_child


class RoundResult(NamedTuple):
    """What came of a round; the tree stands in the way's grower."""

    path: Ints
    """The accepted nodes."""
    next_token: int
    """The target's own token after them."""
    draft_forwards: int


class HostRound:
    """Rounds of any way to decode."""

    def __init__(self, target: Target, capture_sizes: Sequence[int]) -> None:
        self.target = target
        self.capture_sizes = capture_sizes
        self._path = np.zeros(MAX_STEP, np.int64)
        self._block = np.zeros((MAX_STEP, MAX_STEP), np.float32)

    def run(self, root: int, request: Request, point: LoadedPoint) -> RoundResult:
        """Draft, verify, accept, commit."""
        assert point.draft is not None
        num_levels = self._grow_tree(root, request, point.draft, point.grower)
        path, next_token = self.verify(request, point)
        self.target.cache.keep([ROOT, *path.tolist()])
        point.draft.commit(point.grower.tree, path, next_token)
        return RoundResult(path, next_token, num_levels)

    def _grow_tree(self, root: int, request: Request, draft: Draft, grower: TreeGrower) -> int:
        """Draft: alternate between the draft's proposals and the policy's choice, level by level; returns how many."""
        num_levels = 0
        grower.plant(root)
        while len(grower.frontier):
            started = self._clock()
            tokens, logprobs = draft.propose(grower.tree, grower.frontier, grower.policy.num_proposals)
            request.stats.draft_ms += self._clock() - started
            grower.grow(tokens, logprobs)
            num_levels += 1
        grower.prune()
        return num_levels

    def verify(self, request: Request, point: LoadedPoint) -> tuple[Ints, int]:
        """One target forward over root and tree: the accepted nodes, and the token that the target emits after the
        last of them.
        """
        tree, rule = point.grower.tree, request.rule
        count = int(tree.size[0])
        size = round_up(count, self.capture_sizes)
        tree_mask = self._block[:size, :size]
        write_tree_mask(tree, tree_mask, self.target.mask_value)
        started = self._clock()
        nodes, offsets = np.zeros(size, np.int64), np.zeros(size, np.int64)
        nodes[:count] = np.maximum(tree.token[:count], 0)
        offsets[:count] = tree.depth[:count]
        logits = self.target.forward(nodes, offsets, tree_mask)[:count]
        if rule.needs_prefix:
            path, token = self._accept_visiting(logits, request, tree)
        else:
            tokens = rule.tokens(logits, self.target.length + offsets[:count] + 1)
            if isinstance(verification := point.verification, WetapVerification):
                logprobs = rule.logprobs(logits, tree.parent[1:count], nodes[1:count])
                found = accept_by_ratio(tree, logprobs, np.log(verification.threshold), self._path)
            else:
                found = accept_path(tree, tokens, self._path)
            path = self._path[:found].copy()
            token = int(tokens[path[-1] if found else ROOT])
        request.stats.verify_ms += self._clock() - started
        return path, token

    def _accept_visiting(self, logits: Tensor, request: Request, tree: Tree) -> tuple[Ints, int]:
        """The lossless walk where logits processors read the prefix: tokens are decided on the visited nodes only."""
        prefix, node = request.sequence(), ROOT
        path: list[int] = []
        while True:
            token = request.rule.token(logits[node], self.target.length + len(path) + 1, prefix)
            child = find_child(tree, node, token)
            if child < 0:
                return np.array(path, np.int64), token
            path.append(child)
            node = child
            prefix = torch.cat([prefix, torch.tensor([[token]], device=prefix.device)], dim=1)

    def _clock(self) -> float:
        return now_ms(self.target.device)
