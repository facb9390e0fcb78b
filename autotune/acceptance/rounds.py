"""The rounds of one recorded prompt, with their trees, for people to look at: the decoding loop with a trace as its draft.

``replay.py`` does the same thousands of times a second, and keeps counts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autotune.acceptance.replay import check_reach
from autotune.acceptance.trace import Trace
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.fallback import Fallback, RoundPrice
from autotune.trees.policy import Policy, TreeGrower
from autotune.trees.tree import ROOT, Ints, Tree
from autotune.trees.verification import find_child


@dataclass(frozen=True)
class Round:
    """One target forward."""

    position: int
    """Of the root in the answer."""
    tree: Tree | None
    """As it was verified; None for a plain step."""
    path: Ints
    """The nodes accepted, from the root's child on."""
    num_missing: int
    """Nodes that were expanded, and that the trace does not hold."""

    @property
    def num_nodes(self) -> int:
        """Draft nodes verified."""
        return 0 if self.tree is None else int(self.tree.size[0]) - 1


def rounds(trace: Trace, prompt: int, policy: Policy, fallback: RoundPrice | None = None) -> Iterator[Round]:
    """The rounds in which a policy decodes prompt number ``prompt`` of the trace.

    Raises:
        UserError: the policy looks at more children, or grows deeper trees, than the trace holds.
    """
    check_reach(trace, policy)
    begin, end = (int(n) for n in trace.answer_start[prompt : prompt + 2])
    answer, recorded = trace.forest.answer[begin:end], trace.packed
    grower, resting = TreeGrower(policy), Fallback(fallback)
    resting.begin_request()
    position = 0
    while position < len(answer) - 1:
        if resting.is_plain:
            resting.count_plain_step()
            yield Round(position, None, np.zeros(0, np.int64), 0)
            position += 1
            continue
        tree = grower.tree
        grower.plant(int(answer[position]))
        row = np.full(policy.max_grown + 1, recorded.nowhere)  # of the trace, by node
        row[ROOT] = recorded.root_row[begin + position]
        num_levels = num_missing = 0
        while len(grower.frontier) > 0:
            proposals = recorded.proposals[row[grower.frontier], : policy.num_proposals]
            num_levels += 1
            num_missing += int((row[grower.frontier] == recorded.nowhere).sum())
            first = int(tree.size[0])
            grower.grow(proposals["token"], proposals["logprob"])
            added = np.arange(first, int(tree.size[0]))
            row[added] = recorded.proposals[row[tree.parent[added]], tree.rank[added]]["row"]
        grower.prune()
        path: list[int] = []
        node = ROOT
        while position + len(path) + 1 < len(answer):
            node = find_child(tree, node, int(answer[position + len(path) + 1]))
            if node < 0:
                break
            path.append(node)
        found = Round(position, Tree._make(array.copy() for array in tree), np.array(path, np.int64), num_missing)
        grower.update(len(path))
        resting.update(draft_forwards=num_levels, nodes=found.num_nodes, accepted=len(path))
        yield found
        position += len(path) + 1


def count_acceptance(
    trace: Trace, policy: Policy, prompts: list[int], fallback: RoundPrice | None = None
) -> AcceptanceCounts:
    """Which proposals the target takes in the rounds of some prompts. Where images are is not recorded: all counts as text."""
    counts = AcceptanceCounts()
    for prompt in prompts:
        for found in rounds(trace, prompt, policy, fallback):
            if found.tree is not None:
                counts.observe(found.tree, found.path, is_near_image=False)
    return counts
