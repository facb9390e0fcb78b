"""Tree policies as tensor operations, for trees that grow without the host: ``chain``, ``static`` and ``eagle2``, whose
levels have the same sizes in every round. Each grows what its compiled steps in ``trees`` grow, ties included.

Nothing here waits for the device or depends on anything but tensors, so that a round can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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

NEVER = float("-inf")  # the log-probability of what is not there


class DeviceTree(NamedTuple):
    """The tree that is verified, as ``Tree`` but of a fixed number of nodes, n. What fills it up holds ``NO_TOKEN`` and
    stands behind the others.
    """

    token: Tensor
    parent: Tensor
    """The root's is the root."""
    depth: Tensor
    rank: Tensor
    kv_slot: Tensor
    path_logprob: Tensor
    size: Tensor
    """Nodes that are there, a number."""

    @property
    def packed(self) -> Tensor:
        """All of it in one tensor of integers, [fields, n]: log-probabilities bit for bit, the size repeated."""
        *nodes, logprob, size = self
        return torch.stack([*nodes, logprob.view(torch.long), size.expand(len(logprob))])

    @classmethod
    def unpacked(cls, packed: Tensor) -> DeviceTree:
        """What ``packed`` gave."""
        token, parent, depth, rank, slot, logprob, size = packed.unbind(0)
        return cls(token, parent, depth, rank, slot, logprob.view(torch.float64), size[0])


class Frontier(NamedTuple):
    """The nodes that the draft reads next, [width] each."""

    token: Tensor
    row: Tensor
    """Of a node's parent in the frontier before."""


class DeviceGrower(ABC):
    """A policy at work on the device. A round is ``plant``, then ``grow`` as often as there are levels, then ``pruned``."""

    num_nodes: int
    """Of the tree that is verified, the root not counted."""
    widths: tuple[int, ...]
    """Nodes that the draft reads on each level below the root."""
    is_chain: bool
    """Whether no node can have a sibling."""

    @property
    def num_levels(self) -> int:
        """Draft forwards of a round, the root's included."""
        return len(self.widths) + 1

    @abstractmethod
    def plant(self, device: torch.device) -> None:
        """A new round begins."""

    @abstractmethod
    def grow(self, tokens: Tensor, logprobs: Tensor) -> Frontier:
        """Add a level from the proposals [frontier, proposals] of the frontier's nodes; of the last one, the frontier means
        nothing.
        """

    @abstractmethod
    def pruned(self, root: Tensor) -> DeviceTree:
        """What is verified behind the token ``root`` [1]."""


class _Level(NamedTuple):
    """One level of a tree whose shape is known: of each of its nodes the row of its parent in the frontier, its rank; and
    which of them have children.
    """

    row: Tensor
    rank: Tensor
    expanded: Tensor


class FixedGrower(DeviceGrower):
    """``chain`` and ``static``: the same rank paths in every round."""

    def __init__(self, policy: ChainPolicy | StaticPolicy, device: torch.device) -> None:
        paths = policy.ordered_paths
        self.num_nodes = len(paths)
        self._keeps_empty_nodes = isinstance(policy, StaticPolicy)
        parents = {path[:-1] for path in paths}
        frontier: list[tuple[int, ...]] = [()]
        self._levels: list[_Level] = []
        slot: dict[tuple[int, ...], int] = {}
        widths: list[int] = []
        for depth in range(1, policy.max_depth + 1):
            level = [path for path in paths if len(path) == depth]
            expanded = [place for place, path in enumerate(level) if path in parents]
            rows = ([frontier.index(path[:-1]) for path in level], [path[-1] for path in level], expanded)
            self._levels.append(_Level(*(torch.tensor(row, dtype=torch.long, device=device) for row in rows)))
            frontier = [level[place] for place in expanded]
            slot |= {path: len(slot) + place for place, path in enumerate(frontier)}
            widths.append(len(frontier))
        self.widths = tuple(widths[:-1])
        self.is_chain = len(paths) == policy.max_depth
        node = {(): ROOT} | {path: place + 1 for place, path in enumerate(paths)}
        columns = [(ROOT, 0, -1, -1)] + [(node[path[:-1]], len(path), path[-1], slot.get(path, -1)) for path in paths]
        self._parent, self._depth, self._rank, self._slot = torch.tensor(columns, device=device).T.contiguous()

    def plant(self, device: torch.device) -> None:
        """See ``DeviceGrower``."""
        self._frontier_logprob = torch.zeros(1, dtype=torch.float64, device=device)
        self._tokens: list[Tensor] = []
        self._logprobs = [self._frontier_logprob]

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Frontier:
        """See ``DeviceGrower``."""
        row, rank, expanded = self._levels[len(self._tokens)]
        logprob = self._frontier_logprob[row] + logprobs[row, rank].double()
        token = tokens[row, rank].masked_fill(logprob == NEVER, NO_TOKEN)
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._frontier_logprob = logprob[expanded]
        return Frontier(token[expanded], row[expanded])

    def pruned(self, root: Tensor) -> DeviceTree:
        """See ``DeviceGrower``. A chain ends where the draft has no idea; ``static`` keeps the places of such nodes."""
        logprob = torch.cat(self._logprobs)
        is_there = torch.ones_like(logprob) if self._keeps_empty_nodes else logprob > NEVER
        token = torch.cat([root, *self._tokens])
        return DeviceTree(token, self._parent, self._depth, self._rank, self._slot, logprob, is_there.long().sum())


class Eagle2Grower(DeviceGrower):
    """``eagle2``. Candidates are numbered in the order in which they came, which decides between equal ones: k in a row are
    the children of one node of a frontier. Candidate i is node i + 1 until the tree is pruned.
    """

    def __init__(self, policy: Eagle2Policy) -> None:
        self.policy = policy
        # A node below which there is no room among the best is not expanded.
        width = min(policy.k, policy.budget - 1)
        self.widths = (width,) * (policy.depth - 1) if width else ()
        self.num_nodes = min(policy.budget, policy.k + sum(self.widths) * policy.k)
        self.is_chain = policy.k == 1 or policy.budget == 1
        self._log_floor = float(np.log(policy.floor)) if policy.floor else NEVER

    def plant(self, device: torch.device) -> None:
        """See ``DeviceGrower``."""
        self._tokens: list[Tensor] = []
        self._logprob = torch.zeros(0, dtype=torch.float64, device=device)
        self._expanded = [torch.full((1,), ROOT, device=device)]  # nodes, a frontier after the other
        self._frontier_logprob = torch.zeros(1, dtype=torch.float64, device=device)

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Frontier:
        """See ``DeviceGrower``. Where fewer nodes than the frontier holds are worth expanding, candidates that are not there
        fill it up.
        """
        first = len(self._logprob)
        logprob = (self._frontier_logprob[:, None] + logprobs.double()).flatten()
        self._tokens.append(tokens.flatten())
        self._logprob = torch.cat([self._logprob, logprob.masked_fill(logprob < self._log_floor, NEVER)])
        self._best = self._logprob.sort(descending=True, stable=True).indices
        # Of the new candidates the best, if they are among the best of all; below the last of these there is no room.
        best = self._best[: self.policy.budget - 1]
        offsets = (best >= first).byte().sort(descending=True, stable=True).indices
        candidate = best[offsets[: self.policy.k]]
        self._frontier_logprob = self._logprob[candidate].masked_fill(candidate < first, NEVER)
        self._expanded.append((candidate + 1).masked_fill(self._frontier_logprob == NEVER, ROOT))
        new = (candidate - first).clamp(min=0)
        return Frontier(self._tokens[-1][new], new // self.policy.k)

    def pruned(self, root: Tensor) -> DeviceTree:
        """See ``DeviceGrower``: the best candidates, in the order in which they came."""
        number, k = len(self._logprob), self.policy.k
        best = self._best[: self.policy.budget]
        # Those that are not there go to the end.
        kept = best.masked_fill(self._logprob[best] == NEVER, number).sort().values
        is_there, kept = kept < number, kept.clamp(max=number - 1)
        expanded = torch.cat(self._expanded[: self.num_levels])
        row, width = kept // k, max((1, *self.widths))
        slot = torch.full((number + 1,), -1, device=kept.device)
        slot.scatter_(0, expanded, torch.arange(-1, len(expanded) - 1, device=kept.device))
        slot[:1] = -1  # whose place in the frontiers those take that are not there
        # Where each node stands now; nobody follows one that was not kept.
        place = slot.new_zeros(number + 1)
        place.scatter_(0, (kept + 1).masked_fill(~is_there, ROOT), torch.arange(1, len(kept) + 1, device=kept.device))
        place[:1] = ROOT

        def behind_root(first: int, values: Tensor, missing: float) -> Tensor:
            return functional.pad(values.masked_fill(~is_there, missing), (1, 0), value=first)

        return DeviceTree(
            token=torch.cat([root, torch.cat(self._tokens)[kept].masked_fill(~is_there, NO_TOKEN)]),
            parent=behind_root(ROOT, place[expanded[row]], ROOT),
            depth=behind_root(0, 1 + (row + width - 1) // width, 0),
            rank=behind_root(-1, kept % k, -1),
            kv_slot=behind_root(-1, slot[kept + 1], -1),
            path_logprob=behind_root(0, self._logprob[kept], NEVER),
            size=is_there.sum() + 1,
        )


def grower_on_device(policy: Policy, device: torch.device) -> DeviceGrower | None:
    """None: a policy that decides how wide a level is by what was proposed, on the host."""
    if isinstance(policy, ChainPolicy | StaticPolicy):
        return FixedGrower(policy, device)
    return Eagle2Grower(policy) if isinstance(policy, Eagle2Policy) else None


def lineage(parent: Tensor, max_depth: int) -> Tensor:
    """Of each node itself and its ancestors, [nodes, nodes]."""
    seen, above, generations = torch.eye(len(parent), dtype=torch.bool, device=parent.device), parent, 1
    while generations <= max_depth:
        seen, above, generations = seen | seen[above], above[above], 2 * generations
    return seen


def accepted(tree: DeviceTree, seen: Tensor, target_token: Tensor) -> Tensor:
    """Which nodes are on the path that ``accept_path`` walks, the root included: those that hold, as all above them do, what
    the target says after their parent. Siblings hold different tokens.
    """
    is_right = tree.token == target_token[tree.parent]
    is_right = is_right | (torch.arange(len(is_right), device=is_right.device) == ROOT)
    return ~(seen & ~is_right).any(1)
