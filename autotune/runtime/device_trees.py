"""Tree policies as tensor operations, for rounds on the device: ``chain`` without a floor, ``static`` and ``eagle2``,
whose levels have the same sizes in every round. They grow the same trees as the compiled policies in ``trees``, ties
included. Nothing here waits for the device, so that rounds can be captured.

A grower's ``plant`` begins a round; ``grow`` adds a level from the frontier's proposals, [frontier, proposals], and returns
the next frontier (meaningless after the last level); ``pruned`` returns the tree to verify below the token ``root`` [1].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from autotune.trees.policy import Policy
from autotune.trees.static import NO_TOKEN, StaticPolicy
from autotune.trees.tree import ROOT

ABSENT = float("-inf")  # log-probability of a node that does not exist


class DeviceTree(NamedTuple):
    """The draft tree that is verified: ``trees.tree.Tree`` with a fixed number of nodes, n. Padding nodes come last and
    hold ``NO_TOKEN``.
    """

    token: Tensor
    parent: Tensor
    """The root is its own parent."""
    depth: Tensor
    rank: Tensor
    kv_slot: Tensor
    path_logprob: Tensor
    size: Tensor
    """Number of nodes without padding, a scalar."""

    @property
    def packed(self) -> Tensor:
        """All fields as one integer tensor, [fields, n]: log-probabilities bit for bit, the size repeated."""
        *nodes, logprob, size = self
        return torch.stack([*nodes, logprob.view(torch.long), size.expand(len(logprob))])

    @classmethod
    def unpacked(cls, packed: Tensor) -> DeviceTree:
        """The inverse of ``packed``."""
        token, parent, depth, rank, slot, logprob, size = packed.unbind(0)
        return cls(token, parent, depth, rank, slot, logprob.view(torch.float64), size[0])


class Frontier(NamedTuple):
    """The nodes that the draft reads next, [width] each."""

    token: Tensor
    row: Tensor
    """Index of each node's parent in the previous frontier."""


class FixedLevel(NamedTuple):
    """A level of a tree of fixed shape."""

    row: Tensor  # index of each node's parent in the frontier, [nodes]
    rank: Tensor  # [nodes]
    expanded: Tensor  # indices of the nodes with children


class FixedGrower:
    """``chain`` without a floor, and ``static``: the same rank paths in every round."""

    def __init__(self, policy: ChainPolicy | StaticPolicy, device: torch.device) -> None:
        paths = policy.ordered_paths
        self.num_nodes = len(paths)  # the root not counted
        self.keeps_empty_nodes = policy.keeps_empty_nodes
        parents = {path[:-1] for path in paths}
        frontier: list[tuple[int, ...]] = [()]
        self.levels: list[FixedLevel] = []
        slot: dict[tuple[int, ...], int] = {}
        widths: list[int] = []
        for depth in range(1, policy.max_depth + 1):
            level = [path for path in paths if len(path) == depth]
            expanded = [index for index, path in enumerate(level) if path in parents]
            columns = ([frontier.index(path[:-1]) for path in level], [path[-1] for path in level], expanded)
            self.levels.append(
                FixedLevel(*(torch.tensor(column, dtype=torch.long, device=device) for column in columns))
            )
            frontier = [level[index] for index in expanded]
            slot |= {path: len(slot) + index for index, path in enumerate(frontier)}
            widths.append(len(frontier))
        self.widths = tuple(widths[:-1])  # nodes that the draft reads on each level below the root
        self.is_chain = len(paths) == policy.max_depth  # no node can have a sibling
        node = {(): ROOT} | {path: index + 1 for index, path in enumerate(paths)}
        nodes = [(ROOT, 0, -1, -1)] + [(node[path[:-1]], len(path), path[-1], slot.get(path, -1)) for path in paths]
        self._parent, self._depth, self._rank, self._slot = torch.tensor(nodes, device=device).T.contiguous()

    def plant(self, device: torch.device) -> None:
        self._frontier_logprob = torch.zeros(1, dtype=torch.float64, device=device)
        self._tokens: list[Tensor] = []
        self._logprobs = [self._frontier_logprob]

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Frontier:
        row, rank, expanded = self.levels[len(self._tokens)]
        logprob = self._frontier_logprob[row] + logprobs[row, rank].double()
        token = tokens[row, rank].masked_fill(logprob == ABSENT, NO_TOKEN)
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._frontier_logprob = logprob[expanded]
        return Frontier(token[expanded], row[expanded])

    def pruned(self, root: Tensor) -> DeviceTree:
        """A chain ends where the draft proposes nothing; ``static`` keeps such nodes without a token."""
        logprob = torch.cat(self._logprobs)
        exists = torch.ones_like(logprob) if self.keeps_empty_nodes else logprob > ABSENT
        token = torch.cat([root, *self._tokens])
        return DeviceTree(token, self._parent, self._depth, self._rank, self._slot, logprob, exists.long().sum())


class Eagle2Grower:
    """``eagle2``. Candidates are numbered in the order in which they are proposed, which breaks ties: k consecutive ones
    are the children of one frontier node. Until the tree is pruned, candidate i is node i + 1.
    """

    def __init__(self, policy: Eagle2Policy) -> None:
        self.policy = policy
        # Only a node with room for children among the best ``budget`` candidates is expanded.
        width = min(policy.k, policy.budget - 1)
        self.widths = (width,) * (policy.depth - 1) if width else ()
        self.num_nodes = min(policy.budget, policy.k + sum(self.widths) * policy.k)
        self.is_chain = policy.k == 1 or policy.budget == 1
        self.log_floor = float(np.log(policy.floor)) if policy.floor else ABSENT

    def plant(self, device: torch.device) -> None:
        self._tokens: list[Tensor] = []
        self._logprob = torch.zeros(0, dtype=torch.float64, device=device)
        self._expanded = [torch.full((1,), ROOT, device=device)]  # nodes of each frontier
        self._frontier_logprob = torch.zeros(1, dtype=torch.float64, device=device)

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Frontier:
        """Where fewer nodes are expanded than the frontier holds, absent candidates pad it."""
        first = len(self._logprob)
        logprob = (self._frontier_logprob[:, None] + logprobs.double()).flatten()
        self._tokens.append(tokens.flatten())
        self._logprob = torch.cat([self._logprob, logprob.masked_fill(logprob < self.log_floor, ABSENT)])
        self._best = self._logprob.sort(descending=True, stable=True).indices
        # Expand the best new candidates that are among the best ``budget`` - 1 of all: a later one has no room for a child.
        best = self._best[: self.policy.budget - 1]
        order = (best >= first).byte().sort(descending=True, stable=True).indices
        candidate = best[order[: self.policy.k]]
        self._frontier_logprob = self._logprob[candidate].masked_fill(candidate < first, ABSENT)
        self._expanded.append((candidate + 1).masked_fill(self._frontier_logprob == ABSENT, ROOT))
        new = (candidate - first).clamp(min=0)
        return Frontier(self._tokens[-1][new], new // self.policy.k)

    def pruned(self, root: Tensor) -> DeviceTree:
        """Keep the best candidates, in the order in which they were proposed."""
        num_candidates, k = len(self._logprob), self.policy.k
        best = self._best[: self.policy.budget]
        # Absent candidates are sorted to the end.
        kept = best.masked_fill(self._logprob[best] == ABSENT, num_candidates).sort().values
        exists, kept = kept < num_candidates, kept.clamp(max=num_candidates - 1)
        expanded = torch.cat(self._expanded[: len(self.widths) + 1])
        row, width = kept // k, max((1, *self.widths))
        slot = torch.full((num_candidates + 1,), -1, device=kept.device)
        slot.scatter_(0, expanded, torch.arange(-1, len(expanded) - 1, device=kept.device))
        slot[:1] = -1  # absent frontier nodes were written to the root's entry
        # The new index of each node. A node that was not kept is no node's parent.
        index = slot.new_zeros(num_candidates + 1)
        index.scatter_(0, (kept + 1).masked_fill(~exists, ROOT), torch.arange(1, len(kept) + 1, device=kept.device))
        index[:1] = ROOT

        def with_root(root_value: int, values: Tensor, absent: float) -> Tensor:
            return functional.pad(values.masked_fill(~exists, absent), (1, 0), value=root_value)

        return DeviceTree(
            token=torch.cat([root, torch.cat(self._tokens)[kept].masked_fill(~exists, NO_TOKEN)]),
            parent=with_root(ROOT, index[expanded[row]], ROOT),
            depth=with_root(0, 1 + (row + width - 1) // width, 0),
            rank=with_root(-1, kept % k, -1),
            kv_slot=with_root(-1, slot[kept + 1], -1),
            path_logprob=with_root(0, self._logprob[kept], ABSENT),
            size=exists.sum() + 1,
        )


DeviceGrower = FixedGrower | Eagle2Grower


def device_grower(policy: Policy, device: torch.device) -> DeviceGrower | None:
    """None for a policy whose level sizes depend on the proposals."""
    if not policy.has_fixed_levels:
        return None
    if isinstance(policy, ChainPolicy | StaticPolicy):
        return FixedGrower(policy, device)
    return Eagle2Grower(policy) if isinstance(policy, Eagle2Policy) else None


def ancestors(parent: Tensor, max_depth: int) -> Tensor:
    """Each node's ancestors and itself, [nodes, nodes], by repeated squaring."""
    visible, above, generations = torch.eye(len(parent), dtype=torch.bool, device=parent.device), parent, 1
    while generations <= max_depth:
        visible, above, generations = visible | visible[above], above[above], 2 * generations
    return visible


def is_accepted(tree: DeviceTree, visible: Tensor, target_tokens: Tensor) -> Tensor:
    """Whether each node is on the path of ``accept_path``, the root included: it and all its ancestors hold the target's
    token after their parent. Siblings hold different tokens.
    """
    matches = tree.token == target_tokens[tree.parent]
    matches = matches | (torch.arange(len(matches), device=matches.device) == ROOT)
    return ~(visible & ~matches).any(1)
