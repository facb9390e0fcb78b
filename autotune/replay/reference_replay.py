"""The rounds of one recorded prompt with their trees, for reports and tests: the decoding loop with a trace as its
draft.

``replay.py`` does the same thousands of times a second and keeps only counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from autotune.replay.replay import check_reach
from autotune.replay.trace import Trace
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.fallback import Fallback, RoundPrice
from autotune.trees.limits import Ints
from autotune.trees.policy import Policy, TreeGrower
from autotune.trees.tree import ROOT, Retrieved, Tree
from autotune.trees.verification import find_child


@dataclass(frozen=True)
class ReplayedRound:
    """One target forward pass."""

    position: int
    """Index of the root in the answer."""
    tree: Tree | None
    """The verified tree; None for a plain step."""
    path: Ints
    """The accepted nodes, from the root's child on."""
    widths: tuple[int, ...]
    """Nodes expanded in each draft level."""
    num_missing: int
    """As in ``Replay.missing``."""

    @property
    def num_nodes(self) -> int:
        return 0 if self.tree is None else int(self.tree.size[0]) - 1


def rounds(trace: Trace, prompt: int, policy: Policy, fallback: RoundPrice | None = None) -> Iterator[ReplayedRound]:
    """The rounds in which ``policy`` decodes the trace's prompt of index ``prompt``.

    Raises:
        UserError: the policy looks at more children, or grows deeper trees, than the trace holds.
    """
    check_reach(trace, policy)
    num_tokens = int(trace.answer_start[prompt + 1] - trace.answer_start[prompt])
    grower, control = TreeGrower(policy), Fallback(fallback)
    control.begin_request()
    position = 0
    while position < num_tokens - 1:
        if control.is_plain:
            control.count_plain_step()
            replayed = ReplayedRound(position, None, np.zeros(0, np.int64), (), 0)
        else:
            replayed = _round(trace, prompt, position, grower)
            control.update(draft_forwards=len(replayed.widths), nodes=replayed.num_nodes, accepted=len(replayed.path))
        yield replayed
        position += len(replayed.path) + 1


def _round(trace: Trace, prompt: int, position: int, grower: TreeGrower) -> ReplayedRound:
    """Draft, verify, accept, with the proposals of the trace."""
    begin, end = (int(n) for n in trace.answer_start[prompt : prompt + 2])
    answer, recorded = trace.forest.answer[begin:end], trace.packed
    policy, tree = grower.policy, grower.tree
    retrieved = Retrieved(trace.forest.retrieved[begin + position], int(trace.forest.match_length[begin + position]))
    grower.set_root(int(answer[position]), int(trace.prompt_length[prompt]) + position, retrieved)
    row = np.full(policy.size.grown + 1, recorded.unrecorded)  # row of the trace's proposals, by node
    row[ROOT] = recorded.root_row[begin + position]
    widths: list[int] = []
    num_missing = 0
    while len(grower.frontier) > 0:
        widths.append(len(grower.frontier))
        proposals = recorded.proposals[row[grower.frontier]][:, : policy.size.proposals]
        if not policy.keeps_empty_nodes:
            is_proposed = tree.path_logprob[grower.frontier] > -np.inf
            num_missing += int((is_proposed & (row[grower.frontier] == recorded.unrecorded)).sum())
        size = int(tree.size[0])
        grower.grow(proposals["token"], proposals["logprob"])
        added = np.arange(size, int(tree.size[0]))
        row[added] = recorded.proposals[row[tree.parent[added]], tree.rank[added]]["row"]
    grower.prune()
    path: list[int] = []
    node = ROOT
    while position + len(path) + 1 < len(answer):
        node = find_child(tree, node, int(answer[position + len(path) + 1]))
        if node < 0:
            break
        path.append(node)
    copy = Tree._make(array.copy() for array in tree)
    grower.update(len(path), int(answer[position + 1]))
    return ReplayedRound(position, copy, np.array(path, np.int64), tuple(widths), num_missing)


def count_acceptance(decoded: Iterable[ReplayedRound]) -> AcceptanceCounts:
    """Acceptance counts over rounds."""
    counts = AcceptanceCounts()
    for replayed in decoded:
        if replayed.tree is not None:
            counts.observe(replayed.tree, replayed.path)
    return counts
