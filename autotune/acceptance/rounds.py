"""The rounds of one recorded prompt with their trees, for reports and tests: the decoding loop with a trace as its draft.

``replay.py`` does the same thousands of times a second and keeps only counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autotune.acceptance.replay import check_reach
from autotune.acceptance.trace import Trace
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.fallback import Fallback, RoundPrice
from autotune.trees.limits import Ints
from autotune.trees.policy import Policy, TreeGrower
from autotune.trees.tree import ROOT, Tree
from autotune.trees.verification import find_child


@dataclass(frozen=True)
class Round:
    """One target forward pass."""

    position: int
    """Index of the root in the answer."""
    tree: Tree | None
    """The verified tree; None for a plain step."""
    path: Ints
    """The accepted nodes, from the root's child on."""
    num_levels: int
    """Draft forward passes."""
    num_missing: int
    """As in ``Replay.missing``."""

    @property
    def num_nodes(self) -> int:
        """Draft nodes verified."""
        return 0 if self.tree is None else int(self.tree.size[0]) - 1


def rounds(trace: Trace, prompt: int, policy: Policy, fallback: RoundPrice | None = None) -> Iterator[Round]:
    """The rounds in which ``policy`` decodes the trace's prompt of index ``prompt``.

    Raises:
        UserError: the policy looks at more children, or grows deeper trees, than the trace holds.
    """
    check_reach(trace, policy)
    begin, end = (int(n) for n in trace.answer_start[prompt : prompt + 2])
    answer, recorded = trace.forest.answer[begin:end], trace.packed
    grower, control = TreeGrower(policy), Fallback(fallback)
    control.begin_request()
    position = 0
    while position < len(answer) - 1:
        if control.is_plain:
            control.count_plain_step()
            yield Round(position, None, np.zeros(0, np.int64), 0, 0)
            position += 1
            continue
        tree = grower.tree
        grower.plant(int(answer[position]))
        row = np.full(policy.max_grown + 1, recorded.unrecorded)  # row of the trace's proposals, by node
        row[ROOT] = recorded.root_row[begin + position]
        num_levels = num_missing = 0
        while len(grower.frontier) > 0:
            proposals = recorded.proposals[row[grower.frontier], : policy.num_proposals]
            num_levels += 1
            if not policy.keeps_empty_nodes:
                num_missing += int((row[grower.frontier] == recorded.unrecorded).sum())
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
        copy = Tree._make(array.copy() for array in tree)
        verified = Round(position, copy, np.array(path, np.int64), num_levels, num_missing)
        grower.update(len(path))
        control.update(draft_forwards=num_levels, nodes=verified.num_nodes, accepted=len(path))
        yield verified
        position += len(path) + 1


def count_acceptance(
    trace: Trace, policy: Policy, prompts: list[int], fallback: RoundPrice | None = None
) -> AcceptanceCounts:
    """Acceptance counts over the rounds of some prompts, all in the region ``text``: a trace does not hold where images are."""
    counts = AcceptanceCounts()
    for prompt in prompts:
        for verified in rounds(trace, prompt, policy, fallback):
            if verified.tree is not None:
                counts.observe(verified.tree, verified.path, is_near_image=False)
    return counts
