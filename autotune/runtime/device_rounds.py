"""Rounds that the device leads: drafting, verification, acceptance and commits run without the host, which receives the
result in one transfer at the end.

They need trees whose levels have the same sizes in every round, and forward passes over static buffers. In the modes
``cuda-graph`` and ``compile`` a round is then two launches, one for the draft tree and one for its verification, with the
sampling of tokens between them. In mode ``compile`` torch fuses the operations of each before it is captured.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from autotune.drafters.cached_draft import CachedDraft
from autotune.drafters.draft import Coupling
from autotune.execution import EAGER, round_up, without_flex_attention
from autotune.modeling import transfer
from autotune.modeling.cached_model import CachedModel
from autotune.modeling.clock import DeviceTimer
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.graph_runner import GraphRunner
from autotune.modeling.step import DeviceStep
from autotune.modeling.target import Target
from autotune.runtime.device_trees import DeviceGrower, DeviceTree, device_grower
from autotune.runtime.generate_args import Request
from autotune.runtime.host_rounds import RoundResult
from autotune.runtime.points import LoadedPoint
from autotune.runtime.token_sampler import TokenSampler
from autotune.runtime.tree_operations import MaskFormat, TensorTrees
from autotune.runtime.tree_selection import tree_operations
from autotune.trees.policy import Policy
from autotune.trees.tree import ROOT, Ints, Tree

COLUMNS, CROSSING_COLUMNS = "columns", "crossing_columns"
"""Inputs whose shapes hold the padded KV length of a step, and that of the draft's blocks that cross where it is another."""


class DeviceRound:
    """Rounds of one tree policy and draft."""

    def __init__(
        self,
        target: Target,
        draft: CachedDraft,
        policy: Policy,
        grower: DeviceGrower,
        capture_sizes: Sequence[int],
        mode: str,
    ) -> None:
        self.target, self.draft, self.policy, self.grower = target, draft, policy, grower
        self.level_sizes = [round_up(width, capture_sizes) for width in grower.widths]
        self.num_levels = len(grower.widths) + 1  # draft forwards of a round, the root's included
        self.num_nodes = grower.num_nodes + 1
        self.num_tokens = round_up(self.num_nodes, capture_sizes)
        trees = TensorTrees(
            grower,
            target.device,
            policy=policy,
            level_sizes=self.level_sizes,
            num_tokens=self.num_tokens,
            draft_mask=_mask_format(draft),
            target_mask=_mask_format(target),
        )
        self._trees = tree_operations(trees, mode)

        def runner(step: str) -> GraphRunner:
            made = GraphRunner(mode, target.device, description=f"the {step} of {policy.policy} trees")
            for model in (target, draft):
                model.readers.add(made)
            return made

        self._drafting, self._verifying, self._greedy = (
            runner("drafting"),
            runner("verification"),
            runner("verification"),
        )
        self._coupling_sampler: TokenSampler | None = None  # of the round that runs

    def run(self, request: Request, point: LoadedPoint) -> RoundResult:
        """Draft, verify, accept, commit. The root is the draft's last pending token; the tree is copied to the grower."""
        timer = DeviceTimer(self.target.device)
        prefix_state = self._after_pending()
        self._coupling_sampler = point.coupling_sampler(request.sampler)
        packed_tree = self._draft_tree(prefix_state)
        timer.mark()
        report, slots, _, *hidden = self._verify_and_accept(packed_tree, request.sampler)
        if not self.grower.is_chain:
            self.draft.compact_on_device(prefix_state, slots)
        timer.mark()
        tree = point.grower.tree
        path, next_token = read_report(transfer.to_host(report), tree)
        self.target.cache.advance(1 + len(path))
        self.draft.end_device_round(tree, path, next_token, hidden)
        draft_ms, verify_ms = timer.ms
        request.stats.draft_ms += draft_ms
        request.stats.verify_ms += verify_ms
        return RoundResult(path, next_token, self.num_levels)

    def num_uncommitted(self, num_tokens: int) -> int:
        """Tokens after the draft's prefix in a round that reads the pending tokens in a step of ``num_tokens``."""
        num_drafted = sum(self.grower.widths[:-1]) + self.level_sizes[-1] if self.level_sizes else 0
        return max(num_tokens, self.draft.num_pending + num_drafted)

    def prepare_drafting(self, coupling_sampler: TokenSampler | None) -> None:
        """Capture the drafting from the draft's present state."""
        self._coupling_sampler = coupling_sampler
        self._draft_tree(self._after_pending())

    def prepare_verification(self, sampler: TokenSampler) -> None:
        """Capture the verification after the target's present prefix."""
        fields, device = len(DeviceTree._fields), self.target.device
        self._verify_and_accept(torch.zeros(fields, self.num_nodes, dtype=torch.long, device=device), sampler)

    def _after_pending(self) -> Tensor:
        """The draft's prefix state once it has read its pending tokens."""
        prefix_state = self.draft.prefix_state
        prefix_state[0] += self.draft.num_pending
        return transfer.to_device(prefix_state, self.target.device)

    def _draft_tree(self, after_pending: Tensor) -> Tensor:
        """Returns the packed tree. ``after_pending`` is the draft's prefix state once it has read its pending tokens."""
        draft, prefix_state, sampler = self.draft, self.draft.prefix_state, self._coupling_sampler
        pending = draft.pending_inputs()
        num_tokens = len(pending["pending"]) - 1
        num_uncommitted = self.num_uncommitted(num_tokens)
        columns = {COLUMNS: draft.padded_length(draft.length + num_uncommitted)}
        if (crossing_length := draft.padded_crossing_length(num_uncommitted)) is not None:
            columns[CROSSING_COLUMNS] = crossing_length
        inputs = {
            "before_pending": transfer.to_device(prefix_state, self.target.device),
            "after_pending": after_pending,
            **pending,
            **{name: self._empty_columns(length) for name, length in columns.items()},
        }
        key: tuple[Hashable, ...] = num_tokens, len(prefix_state), *columns
        if sampler is not None:
            first = self.target.length + 1
            inputs["noise"] = sampler.noise(range(first, first + self.num_levels), draft.target_vocab_size)
            key = *key, sampler.capture_key
        (packed_tree,) = self._drafting.run(self._grow_tree, key, inputs, draft.dtype, padded=columns)
        return packed_tree

    def _verify_and_accept(self, packed_tree: Tensor, sampler: TokenSampler) -> Outputs:
        """The outputs of ``_accept``. Sampling depends on the request's seed and is not captured."""
        target, prefix_state = self.target, self.target.prefix_state
        padded_kv_length = target.padded_length(target.length + self.num_tokens)
        inputs = {
            "target": transfer.to_device(prefix_state, target.device),
            "tree": packed_tree,
            COLUMNS: self._empty_columns(padded_kv_length),
        }
        key, padded = (self.num_tokens, len(prefix_state)), (COLUMNS,)
        if sampler.is_greedy:
            return self._greedy.run(
                self._verify_greedily, key, inputs, target.dtype, padded=padded, sequel=self._compact
            )
        packed_tree = inputs["tree"] = (
            packed_tree.clone()
        )  # an output of the drafting, which the verification may overwrite
        logits, *hidden = self._verifying.run(self._verify, key, inputs, target.dtype, padded=padded)
        depths = DeviceTree.unpacked(packed_tree).depth
        tokens = sampler.tokens_on_device(logits, target.length + 1, depths, self.policy.max_depth + 1)
        outputs = self._accept(inputs, tokens, hidden)
        self._compact(inputs, outputs)
        return outputs

    def _empty_columns(self, padded_kv_length: int) -> Tensor:
        """A tensor [0, padded KV length]: only its shape is read."""
        return torch.empty(0, padded_kv_length, device=self.target.device)

    # ------------------------------------- captured: these may use host values only if all rounds of a key share them

    def _grow_tree(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """Draft a tree level by level: the draft proposes, the tree policy chooses. Returns the packed tree."""
        draft, trees = self.draft, self._trees
        padded_kv_length = inputs[COLUMNS].shape[-1]
        padded_crossing_length = inputs[CROSSING_COLUMNS].shape[-1] if CROSSING_COLUMNS in inputs else None
        num_proposals = self.policy.num_proposals
        trees.plant()
        logits = draft.propose_on_device(
            inputs["before_pending"],
            inputs,
            padded_kv_length=padded_kv_length,
            padded_crossing_length=padded_crossing_length,
        )
        level = trees.grow(*draft.best_on_device(logits, num_proposals, self._coupling(inputs, level=0)))
        for depth, width in enumerate(self.grower.widths, 1):
            assert level is not None
            step = DeviceStep(
                inputs["after_pending"],
                level.tokens,
                level.offsets,
                level.tree_mask,
                level.column_offsets,
                padded_kv_length,
                padded_crossing_length,
            )
            logits = draft.forward_on_device(step, level.parents)
            level = trees.grow(*draft.best_on_device(logits[:width], num_proposals, self._coupling(inputs, depth)))
        root = inputs["pending"][inputs["pending"][:1]]  # "pending" is a count n followed by n tokens
        return (trees.pruned(root),)

    def _coupling(self, inputs: Mapping[str, Tensor], level: int) -> Coupling | None:
        """The coupling of the nodes of one level. ``noise`` [levels, vocabulary] is an input, the other settings of the
        sampler are part of the key.
        """
        sampler = self._coupling_sampler
        return None if sampler is None else functools.partial(sampler.perturbed, noise=inputs["noise"][level])

    def _verify(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """The target's logits after each node, [nodes, vocabulary], and its outputs at the draft's auxiliary layers."""
        tokens, offsets, tree_mask = self._trees.verification_step(inputs["tree"])
        step = DeviceStep(inputs["target"], tokens, offsets, tree_mask, offsets, inputs[COLUMNS].shape[-1])
        logits = self.target.forward_on_device(step)
        return logits[: self.num_nodes], *(self.target.hidden[layer] for layer in self.draft.aux_layers)

    def _verify_greedily(self, inputs: Mapping[str, Tensor]) -> Outputs:
        logits, *hidden = self._verify(inputs)
        return self._accept(inputs, logits.argmax(-1), hidden)

    def _accept(self, inputs: Mapping[str, Tensor], target_tokens: Tensor, hidden: Sequence[Tensor]) -> Outputs:
        """Accept a path.

        Returns:
            The report that ``read_report`` reads; for the draft's commit, the slots of the accepted nodes; the accepted nodes
            themselves, the root first, and their features. All are padded with other nodes to the longest possible path.
        """
        report, slots, path = self._trees.accepted(inputs["tree"], target_tokens)
        return report, slots, path, *(states[path] for states in hidden)

    def _compact(self, inputs: Mapping[str, Tensor], outputs: Outputs) -> None:
        """Compact the target's cache to the path of ``_accept``.

        A capture runs its work several times before the first replay, so this may change only what the verification
        writes again. It is not compiled with the verification, whose layers write to views of the memory that this moves.
        """
        if not self.grower.is_chain:  # the accepted nodes of a chain are contiguous already
            self.target.cache.compact(inputs["target"][0], outputs[2])


def read_report(report: Ints, tree: Tree) -> tuple[Ints, int]:
    """Copy a round's tree to the host's ``tree``; returns the accepted nodes and the target's token after them."""
    token, parent, depth, rank, slot, logprob, size, target_tokens, accepted = report
    count = int(size[0])
    tree.size[0] = count
    for destination, source in zip(
        (tree.token, tree.parent, tree.depth, tree.rank, tree.kv_slot, tree.path_logprob),
        (token, parent, depth, rank, slot, logprob.view(np.float64)),
        strict=True,
    ):
        destination[:count] = source[:count]
    tree.parent[ROOT] = -1
    path = np.flatnonzero(accepted)[1:]
    return path, int(target_tokens[path[-1] if len(path) else ROOT])


def _mask_format(model: CachedModel) -> MaskFormat:
    return MaskFormat(model.dtype, model.mask_value)


def _pays(device: torch.device, mode: str) -> bool:
    """On a CPU transfers are free, and compiled tree policies are faster than tensor operations."""
    return mode != EAGER and (device.type != "cpu" or without_flex_attention(mode) != "compile")


class DeviceRounds:
    """The device rounds of a decoder, each created when it is first needed."""

    def __init__(self, target: Target, capture_sizes: Sequence[int], mode: str) -> None:
        self.mode = mode
        self._target = target
        self._capture_sizes = capture_sizes
        self._rounds: dict[tuple[Policy, CachedDraft], DeviceRound] = {}

    def get(self, point: LoadedPoint, sampler: TokenSampler) -> DeviceRound | None:
        """None where the host must lead: the tree policy, verification, logits processors or draft decide on the host, the
        processors that a coupled draft applies cannot be captured, or leading on the device does not pay.
        """
        target, draft = self._target, point.draft
        if not _pays(target.device, self.mode) or not isinstance(draft, CachedDraft) or draft.device != target.device:
            return None
        if draft.drafts_blocks:  # the host reads one transfer a round anyway
            return None
        if not point.verification.is_lossless or sampler.needs_prefix:
            return None
        if (coupled := point.coupling_sampler(sampler)) is not None and coupled.capture_key is None:
            return None
        if (point.policy, draft) not in self._rounds:
            if (grower := device_grower(point.policy, target.device)) is None:
                return None
            device_round = DeviceRound(target, draft, point.policy, grower, self._capture_sizes, self.mode)
            self._rounds[point.policy, draft] = device_round
        return self._rounds[point.policy, draft]
