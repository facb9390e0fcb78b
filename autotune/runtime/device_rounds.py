"""A round that the device leads: draft levels, tree, verification, acceptance and the caches' commits follow each other
without the host, which hears of it in one transfer at the end.

For trees whose levels have the same sizes in every round, over prepared forwards. The work depends on its buffers alone,
so the runner ``graph`` captures all of it for a size: drafting is one launch, and so is what follows, but for the choice of
sampled tokens in between. With ``compile`` its forwards are compiled, each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from autotune.drafters.cached_draft import CachedDraft
from autotune.execution import round_up
from autotune.modeling import transfer
from autotune.modeling.clock import DeviceTimer
from autotune.modeling.graph_runner import DeviceStep, GraphRunner, Outputs, padded_length
from autotune.modeling.kv_cache import CachedModel
from autotune.modeling.target import Target
from autotune.runtime.device_trees import DeviceGrower, DeviceTree, accepted, grower_on_device, lineage
from autotune.runtime.host_rounds import RoundResult
from autotune.runtime.points import LoadedPoint
from autotune.runtime.request import Request
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.policy import Policy, TreeGrower
from autotune.trees.tree import ROOT, Ints, Tree


@dataclass(frozen=True)
class WorkSize:
    """Work of one size is the same work on the same memory."""

    tokens: int
    """That are read first, filled up."""
    padded_kv_length: int
    prefix_state: int
    """Numbers that say where the prefix ends."""


class DeviceRound:
    """Rounds of one tree policy and draft: two pieces of prepared work, of which each is launched as a whole."""

    def __init__(
        self, target: Target, draft: CachedDraft, policy: Policy, grower: DeviceGrower, capture_sizes: Sequence[int]
    ) -> None:
        assert target.graph_runner is not None
        self.target, self.draft, self.policy, self.grower = target, draft, policy, grower
        self.level_sizes = [round_up(width, capture_sizes) for width in grower.widths]
        self.num_nodes = grower.num_nodes + 1
        self.num_tokens = round_up(self.num_nodes, capture_sizes)
        mode = "cuda-graph" if target.graph_runner.mode == "cuda-graph" else "fixed"
        self._drafting, self._verifying, self._greedy = (
            GraphRunner(mode, work, target.device, what=f"the {name} of {policy.policy} trees")
            for work, name in (
                (self._grow_tree, "drafting"),
                (self._verify, "verification"),
                (self._verify_greedily, "verification"),
            )
        )
        self._extent = 0  # of the work that runs
        self._caches = target.cache, draft.cache

    def run(self, request: Request, grower: TreeGrower) -> RoundResult:
        """Draft, verify, accept, commit. The root is the last of the draft's pending tokens; the tree is told to ``grower``."""
        self._forget_former_caches()
        laps = DeviceTimer(self.target.device)
        behind_pending = self.draft.prefix_state
        behind_pending[0] += self.draft.num_pending
        prefix_state = transfer.to_device(behind_pending, self.target.device)
        tree = self._draft_tree(prefix_state)
        laps.mark()
        report, slots, *hidden = self._verify_and_accept(tree, request.rule)
        if not self.grower.is_chain:
            self.draft.compact_on_device(prefix_state, slots)
        laps.mark()
        path, next_token = read_report(transfer.to_host(report), grower.tree)
        self.target.cache.advance(1 + len(path))
        self.draft.end_device_round(grower.tree, path, next_token, hidden)
        draft_ms, verify_ms = laps.ms
        request.stats.draft_ms += draft_ms
        request.stats.verify_ms += verify_ms
        return RoundResult(path, next_token, self.grower.num_levels)

    def _draft_tree(self, behind_pending: Tensor) -> Tensor:
        """The tree, packed."""
        draft, prefix_state = self.draft, self.draft.prefix_state
        inputs = {
            "before_pending": transfer.to_device(prefix_state, self.target.device),
            "behind_pending": behind_pending,
            **draft.pending_inputs(),
        }
        num_tokens = len(inputs["pending"]) - 1
        num_read = sum(self.grower.widths[:-1]) + self.level_sizes[-1] if self.level_sizes else 0
        self._extent = padded_length(draft.length + max(num_tokens, draft.num_pending + num_read))
        (tree,) = self._drafting.run(WorkSize(num_tokens, self._extent, len(prefix_state)), inputs, draft.dtype)
        return tree

    def _verify_and_accept(self, tree: Tensor, rule: TokenSampler) -> Outputs:
        """As ``_accept`` gives it. The choice of sampled tokens is each request's own, and no part of prepared work."""
        target, prefix_state = self.target, self.target.prefix_state
        inputs = {
            "target": transfer.to_device(prefix_state, target.device),
            "tree": tree,
        }
        self._extent = padded_length(target.length + self.num_tokens)
        size = WorkSize(self.num_tokens, self._extent, len(prefix_state))
        if rule.is_greedy:
            return self._greedy.run(size, inputs, target.dtype)
        logits, *hidden = self._verifying.run(size, inputs, target.dtype)
        num_depths = self.policy.max_depth + 1
        said = rule.tokens_on_device(logits, target.length + 1, DeviceTree.unpacked(tree).depth, num_depths)
        return self._accept(inputs, said, hidden)

    def _forget_former_caches(self) -> None:
        """Longer requests come with larger caches."""
        if self._caches != (self.target.cache, self.draft.cache):
            self._caches = self.target.cache, self.draft.cache
            for prepared in (self._drafting, self._verifying, self._greedy):
                prepared.forget()

    # ---------------------------------------------------- on the device: of the host, what is the same for all of a size

    def _grow_tree(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """Alternate between the draft's proposals and the policy's choice, level by level; the tree, packed."""
        draft, grower, device = self.draft, self.grower, self.target.device
        padded_kv_length, num_proposals = self._extent, self.policy.num_proposals
        grower.plant(device)
        logits = draft.propose_on_device(inputs["before_pending"], inputs, padded_kv_length=padded_kv_length)
        frontier = grower.grow(*draft.best_on_device(logits, num_proposals))
        seen = torch.zeros(1, 0, dtype=torch.bool, device=device)  # of the slots, by each node of the frontier
        offsets = torch.zeros(0, dtype=torch.long, device=device)  # of the slots
        first_parent = -1  # slot of the first node of the level above; the root has none
        for level, (width, size) in enumerate(zip(grower.widths, self.level_sizes, strict=True)):
            begin, more = seen.shape[1], size - width
            itself = torch.eye(width, dtype=torch.bool, device=device)
            seen = torch.cat([seen[frontier.row], itself], 1)
            here = torch.full((size,), level, device=device)
            step = DeviceStep(
                inputs["behind_pending"],
                pad(frontier.token.clamp(min=0), (0, more)),
                here,
                _block(draft, seen, more),
                torch.cat([offsets, here]),
                padded_kv_length,
            )
            logits = draft.read_on_device(step, parents=pad(frontier.row + first_parent, (0, more)))
            frontier = grower.grow(*draft.best_on_device(logits[:width], num_proposals))
            offsets, first_parent = torch.cat([offsets, here[:width]]), begin
        root = inputs["pending"][inputs["pending"][:1]]  # behind their number the last of them
        return (grower.pruned(root).packed,)

    def _verify(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """The target's logits after each node, and what the draft reads of it there."""
        tree, target = DeviceTree.unpacked(inputs["tree"]), self.target
        more = self.num_tokens - self.num_nodes
        tokens, offsets = pad(tree.token.clamp(min=0), (0, more)), pad(tree.depth, (0, more))
        tree_mask = _block(target, lineage(tree.parent, self.policy.max_depth), more)
        logits = target.forward_on_device(
            DeviceStep(inputs["target"], tokens, offsets, tree_mask, offsets, self._extent)
        )
        return logits[: self.num_nodes], *(target.hidden[layer] for layer in self.draft.aux_layers)

    def _verify_greedily(self, inputs: Mapping[str, Tensor]) -> Outputs:
        logits, *hidden = self._verify(inputs)
        return self._accept(inputs, logits.argmax(-1), hidden)

    def _accept(self, inputs: Mapping[str, Tensor], said: Tensor, hidden: Sequence[Tensor]) -> Outputs:
        """The commit of the target's cache, and what the host must hear: see ``read_report``; then what the draft's commit needs:
        the accepted nodes' slots, and their features, the root's first; beside them those of as many others as a longer
        path would have had. What is prepared runs several times before it runs once, so this may move only what the
        verification writes anew.
        """
        tree, max_depth = DeviceTree.unpacked(inputs["tree"]), self.policy.max_depth
        is_accepted = accepted(tree, lineage(tree.parent, max_depth), said)
        path = is_accepted.byte().sort(descending=True, stable=True).indices[: max_depth + 1]
        if not self.grower.is_chain:  # whose accepted nodes stand in a row
            self.target.cache.compact(inputs["target"][0], path)
        report = torch.cat([inputs["tree"], torch.stack([said, is_accepted.long()])])
        return report, tree.kv_slot[path[1:]], *(states[path] for states in hidden)


def read_report(report: Ints, tree: Tree) -> tuple[Ints, int]:
    """Copy a round's tree, but for what only its growth needed, to the host's; returns the accepted nodes and the target's own
    token after them.
    """
    token, parent, depth, rank, slot, logprob, size, said, is_accepted = report
    count = int(size[0])
    tree.size[0] = count
    for mine, found in zip(
        (tree.token, tree.parent, tree.depth, tree.rank, tree.kv_slot, tree.path_logprob),
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
    tree_mask = torch.full(shape, model.mask_value, dtype=model.dtype, device=seen.device)
    tree_mask[: seen.shape[0], : seen.shape[1]].masked_fill_(seen, 0.0)
    return tree_mask


def _is_worth_it(device: torch.device, mode: str) -> bool:
    """On a CPU nobody waits for a transfer, and the policies' compiled steps are faster than tensor operations; but ``fixed``
    does there what others do elsewhere.
    """
    return device.type != "cpu" or mode != "compile"


class DeviceRounds:
    """Those of a decoder, each prepared when it is first needed."""

    def __init__(self, target: Target, capture_sizes: Sequence[int]) -> None:
        self._target = target
        self._buckets = capture_sizes
        self._made: dict[tuple[Policy, CachedDraft], DeviceRound] = {}

    def of(self, point: LoadedPoint, rule: TokenSampler) -> DeviceRound | None:
        """None where the host has to lead: a policy, a verification, logits processors or a draft whose next step depends on
        what it has heard; and where forwards are not prepared, or hearing of them costs nothing.
        """
        target, draft = self._target, point.draft
        if target.graph_runner is None or not _is_worth_it(target.device, target.graph_runner.mode):
            return None
        if not isinstance(draft, CachedDraft) or draft.device != target.device:
            return None
        if not point.verification.is_lossless or rule.needs_prefix:
            return None
        if (point.policy, draft) not in self._made:
            if (grower := grower_on_device(point.policy, target.device)) is None:
                return None
            self._made[point.policy, draft] = DeviceRound(target, draft, point.policy, grower, self._buckets)
        return self._made[point.policy, draft]
