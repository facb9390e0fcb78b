"""A round that the device leads: draft levels, tree, verification, acceptance and the caches' commits follow each other
without the host, which hears of it in one transfer at the end.

For trees whose levels have the same sizes in every round, over prepared forwards. The work depends on its buffers alone,
so the runner ``graph`` captures all of it for a size, and a round is one launch; with ``compile`` its forwards are
compiled, each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from autotune.drafters.cached_draft import CachedDraft
from autotune.runtime import transfer
from autotune.runtime.device_trees import DeviceGrower, DeviceTree, accepted, grower_on_device, lineage
from autotune.runtime.graphs import Outputs, PreparedForwards, extent_of
from autotune.runtime.host_round import Verified
from autotune.runtime.kv_cache import CachedModel
from autotune.runtime.request import Request
from autotune.runtime.stats import now_ms
from autotune.runtime.target import Target
from autotune.runtime.token_rule import TokenRule
from autotune.runtime.way import Way
from autotune.trees.buckets import round_up
from autotune.trees.policy import Policy, TreeGrower
from autotune.trees.tree import ROOT, Ints, Tree


@dataclass(frozen=True)
class RoundSize:
    """Rounds of one size are the same work on the same memory."""

    pending: int
    """Tokens that the draft reads with the root, filled up."""
    draft_extent: int
    target_extent: int
    position_axes: int


class Unsaid(NamedTuple):
    """A round before the target's tokens are chosen."""

    logits: Tensor
    """Of the target after each node."""
    tree: DeviceTree
    hidden: tuple[Tensor, ...]
    """Of the target at each node, in the layers that the draft reads."""

    @property
    def outputs(self) -> Outputs:
        """All of it in a row, as prepared work gives it."""
        return self.logits, *self.tree, *self.hidden

    @classmethod
    def of(cls, outputs: Outputs) -> Unsaid:
        """What ``outputs`` gave."""
        behind_tree = 1 + len(DeviceTree._fields)
        return cls(outputs[0], DeviceTree(*outputs[1:behind_tree]), outputs[behind_tree:])


class DeviceRound:
    """Rounds of one tree policy and draft."""

    def __init__(
        self, target: Target, draft: CachedDraft, policy: Policy, grower: DeviceGrower, buckets: Sequence[int]
    ) -> None:
        assert target.prepared is not None
        self.target, self.draft, self.policy, self.grower = target, draft, policy, grower
        self.level_sizes = [round_up(width, buckets) for width in grower.widths]
        self.num_nodes = grower.num_nodes + 1
        self.num_tokens = round_up(self.num_nodes, buckets)
        self.size = RoundSize(0, 0, 0, 0)
        """Of the latest round."""
        runner = "graph" if target.prepared.runner == "graph" else "fixed"
        what = f"a round of {policy.policy}"
        self._greedy = PreparedForwards(runner, self._greedy_work, target.device, what=what)
        self._unsaid = PreparedForwards(runner, self._unsaid_work, target.device, what=what)
        self._caches = target.cache, draft.cache

    def run(self, request: Request, grower: TreeGrower) -> Verified:
        """Draft, verify, accept, commit. The root is the last of the draft's pending tokens; the tree is told to ``grower``."""
        started = now_ms(self.target.device)
        self._forget_former_caches()
        target, draft, rule = self.target, self.draft, request.rule
        inputs = {
            "target": transfer.to_device(target.stand, target.device),
            "draft": transfer.to_device(draft.stand, target.device),
            **draft.pending_inputs(),
        }
        self.size = self._size(len(inputs["pending"]) - 1)
        if rule.is_greedy:
            report, *hidden = self._greedy.run(self.size, inputs, target.dtype)
        else:
            unsaid = Unsaid.of(self._unsaid.run(self.size, inputs, target.dtype))
            num_depths = self.policy.max_depth + 1
            said = rule.tokens_on_device(unsaid.logits, target.length + 1, unsaid.tree.depth, num_depths)
            report, *hidden = self._accept(inputs, unsaid, said)
        path, next_token = read_report(transfer.to_host(report), grower.tree)
        target.cache.advance(1 + len(path))
        draft.end_device_round(grower.tree, path, next_token, hidden)
        # One piece of work: nobody can time its parts without waiting for them.
        request.stats.verify_ms += now_ms(target.device) - started
        return Verified(path, next_token, self.grower.num_levels)

    def _forget_former_caches(self) -> None:
        """Longer requests come with larger caches."""
        if self._caches != (self.target.cache, self.draft.cache):
            self._caches = self.target.cache, self.draft.cache
            self._greedy.forget()
            self._unsaid.forget()

    def _size(self, num_pending: int) -> RoundSize:
        num_read = sum(self.grower.widths[:-1]) + self.level_sizes[-1] if self.level_sizes else 0
        return RoundSize(
            pending=num_pending,
            draft_extent=extent_of(self.draft.length + max(num_pending, self.draft.num_pending + num_read)),
            target_extent=extent_of(self.target.length + self.num_tokens),
            position_axes=len(self.target.stand),
        )

    # ---------------------------------------------------- on the device: of the host, what is the same for all of a size

    def _greedy_work(self, inputs: Mapping[str, Tensor]) -> Outputs:
        unsaid = self._draft_and_verify(inputs)
        return self._accept(inputs, unsaid, unsaid.logits.argmax(-1))

    def _unsaid_work(self, inputs: Mapping[str, Tensor]) -> Outputs:
        return self._draft_and_verify(inputs).outputs

    def _draft_and_verify(self, inputs: Mapping[str, Tensor]) -> Unsaid:
        tree, target = self._grow_tree(inputs), self.target
        more = self.num_tokens - self.num_nodes
        tokens, places = pad(tree.token.clamp(min=0), (0, more)), pad(tree.depth, (0, more))
        block = _block(target, lineage(tree.parent, self.policy.max_depth), more)
        logits = target.forward_on_device(
            inputs["target"], tokens, places, block, places, extent=self.size.target_extent
        )
        return Unsaid(logits[: self.num_nodes], tree, tuple(target.hidden[layer] for layer in self.draft.reads))

    def _grow_tree(self, inputs: Mapping[str, Tensor]) -> DeviceTree:
        """Alternate between the draft's proposals and the policy's choice, level by level."""
        draft, grower, device = self.draft, self.grower, self.target.device
        extent, num_proposals = self.size.draft_extent, self.policy.num_proposals
        grower.plant(device)
        logits = draft.propose_on_device(inputs["draft"], inputs, extent=extent)
        frontier = grower.grow(*draft.best_on_device(logits, num_proposals))
        stand = _behind_pending(inputs)
        seen = torch.zeros(1, 0, dtype=torch.bool, device=device)  # of the slots, by each node of the frontier
        places = torch.zeros(0, dtype=torch.long, device=device)  # of the slots
        first_parent = -1  # slot of the first node of the level above; the root has none
        for level, (width, size) in enumerate(zip(grower.widths, self.level_sizes, strict=True)):
            begin, more = seen.shape[1], size - width
            itself = torch.eye(width, dtype=torch.bool, device=device)
            seen = torch.cat([seen[frontier.row], itself], 1)
            here = torch.full((size,), level, device=device)
            logits = draft.read_on_device(
                stand,
                pad(frontier.token.clamp(min=0), (0, more)),
                here,
                _block(draft, seen, more),
                torch.cat([places, here]),
                extent=extent,
                parents=pad(frontier.row + first_parent, (0, more)),
            )
            frontier = grower.grow(*draft.best_on_device(logits[:width], num_proposals))
            places, first_parent = torch.cat([places, here[:width]]), begin
        return grower.pruned(_root(inputs))

    def _accept(self, inputs: Mapping[str, Tensor], unsaid: Unsaid, said: Tensor) -> Outputs:
        """The caches' commit, and what the host must hear: see ``read_report``; then the features of the accepted nodes, the
        root's first, and of as many others as a longer path would have had.
        """
        tree, max_depth = unsaid.tree, self.policy.max_depth
        is_accepted = accepted(tree, lineage(tree.parent, max_depth), said)
        path = is_accepted.byte().sort(descending=True, stable=True).indices[: max_depth + 1]
        if not self.grower.is_chain:  # whose accepted nodes stand in a row
            self.target.cache.compact(inputs["target"][0], path)
            self.draft.compact_on_device(_behind_pending(inputs), tree.slot[path[1:]])
        logprob, size = tree.path_logprob.view(torch.long), tree.size.expand(len(said))
        rows = (tree.token, tree.parent, tree.depth, tree.rank, tree.slot, logprob, size, said, is_accepted.long())
        return torch.stack(rows), *(states[path] for states in unsaid.hidden)


def read_report(report: Ints, tree: Tree) -> tuple[Ints, int]:
    """Copy a round's tree, but for what only its growth needed, to the host's; returns the accepted nodes and the target's own
    token after them.
    """
    token, parent, depth, rank, slot, logprob, size, said, is_accepted = report
    count = int(size[0])
    tree.size[0] = count
    for mine, found in zip(
        (tree.token, tree.parent, tree.depth, tree.rank, tree.slot, tree.path_logprob),
        (token, parent, depth, rank, slot, logprob.view(np.float64)),
        strict=True,
    ):
        mine[:count] = found[:count]
    tree.parent[ROOT] = -1
    path = np.flatnonzero(is_accepted)[1:]
    return path, int(said[path[-1] if len(path) else ROOT])


def _block(model: CachedModel, seen: Tensor, more: int) -> Tensor:
    """The additive mask of tokens that see ``seen``, filled up by so many rows and columns."""
    shape = seen.shape[0] + more, seen.shape[1] + more
    block = torch.full(shape, model.closed, dtype=model.dtype, device=seen.device)
    block[: seen.shape[0], : seen.shape[1]].masked_fill_(seen, 0.0)
    return block


def _behind_pending(inputs: Mapping[str, Tensor]) -> Tensor:
    """Where the draft's prefix ends once the pending tokens belong to it."""
    stand = inputs["draft"]
    return torch.cat([stand[:1] + inputs["pending"][:1], stand[1:]])


def _root(inputs: Mapping[str, Tensor]) -> Tensor:
    """The last pending token, [1]."""
    return inputs["pending"][inputs["pending"][:1]]


class DeviceRounds:
    """Those of a decoder, each prepared when it is first needed."""

    def __init__(self, target: Target, buckets: Sequence[int]) -> None:
        self._target = target
        self._buckets = buckets
        self._made: dict[tuple[Policy, CachedDraft], DeviceRound] = {}

    def of(self, way: Way, rule: TokenRule) -> DeviceRound | None:
        """None where the host has to lead: a policy, a verification, logits processors or a draft whose next step depends on
        what it has heard; and where hearing costs nothing, on a CPU that was told to compile.
        """
        target, draft = self._target, way.draft
        if target.prepared is None or (target.device.type == "cpu" and target.prepared.runner == "compile"):
            return None
        if not isinstance(draft, CachedDraft) or draft.device != target.device:
            return None
        if not way.verification.is_lossless or rule.needs_prefix:
            return None
        if (way.policy, draft) not in self._made:
            if (grower := grower_on_device(way.policy, target.device)) is None:
                return None
            self._made[way.policy, draft] = DeviceRound(target, draft, way.policy, grower, self._buckets)
        return self._made[way.policy, draft]
