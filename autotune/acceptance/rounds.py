"""The rounds of one recorded prompt with their trees, for reports and tests: the decoding loop with a trace as its draft.

``replay.py`` does the same thousands of times a second and keeps only counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autotune.acceptance.replay import check_reach
from autotune.acceptance.trace import Trace
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.fallback import Fallback, RoundPrice
from autotune.trees.limits import Ints
from autotune.trees.policy import Policy, TreeGrower
from autotune.trees.tree import ROOT, Retrieved, Tree
from autotune.trees.verification import find_child


@dataclass(frozen=True)
class Round:
    """One target forward pass."""

    position: int
    """Index of the root in the answer."""
    context_tokens: int
    """Tokens in the target's KV cache at the start of the round."""
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


def rounds(
    trace: Trace, prompt: int, policy: Policy, fallback: RoundPrice | None = None, *, first: int = 0
) -> Iterator[Round]:
    """The rounds in which ``policy`` decodes the trace's prompt of index ``prompt``.

    Args:
        first: index in the answer of the first root: a request that is switched to ``policy`` begins there.

    Raises:
        UserError: the policy looks at more children, or grows deeper trees, than the trace holds.
    """
    check_reach(trace, policy)
    begin, end = (int(n) for n in trace.answer_start[prompt : prompt + 2])
    answer, recorded = trace.forest.answer[begin:end], trace.packed
    grower, control = TreeGrower(policy), Fallback(fallback)
    control.begin_request()
    position, prompt_tokens = first, int(trace.prompt_length[prompt])
    while position < len(answer) - 1:
        if control.is_plain:
            control.count_plain_step()
            yield Round(position, prompt_tokens + position, None, np.zeros(0, np.int64), 0, 0)
            position += 1
            continue
        tree = grower.tree
        forest = trace.forest
        found = Retrieved(forest.retrieved[begin + position], int(forest.match_length[begin + position]))
        grower.plant(int(answer[position]), prompt_tokens + position, found)
        row = np.full(policy.max_grown + 1, recorded.unrecorded)  # row of the trace's proposals, by node
        row[ROOT] = recorded.root_row[begin + position]
        num_levels = num_missing = 0
        while len(grower.frontier) > 0:
            proposals = recorded.proposals[row[grower.frontier], : policy.num_proposals]
            num_levels += 1
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
        path_nodes = np.array(path, np.int64)
        verified = Round(position, prompt_tokens + position, copy, path_nodes, num_levels, num_missing)
        grower.update(len(path), int(answer[position + 1]))
        control.update(draft_forwards=num_levels, nodes=verified.num_nodes, accepted=len(path))
        yield verified
        position += len(path) + 1


def switched_rounds(
    trace: Trace,
    prompt: int,
    points: Mapping[int, tuple[Policy | None, RoundPrice | None]],
    point_at: Callable[[int], int],
) -> Iterator[tuple[int, Round]]:
    """The rounds of a request that is switched between points while its context grows, each after the number of its point.

    Args:
        points: tree policy (None for plain decoding) and price of a round by number of the point.
        point_at: number of the point for a context length.

    Raises:
        UserError: as ``rounds``.
    """
    num_tokens = int(trace.answer_start[prompt + 1] - trace.answer_start[prompt])
    prompt_tokens, position = int(trace.prompt_length[prompt]), 0
    while position < num_tokens - 1:
        number = point_at(prompt_tokens + position)
        policy, price = points[number]
        step = Round(position, prompt_tokens + position, None, np.zeros(0, np.int64), 0, 0)
        for one in [step] if policy is None else rounds(trace, prompt, policy, price, first=position):
            if point_at(one.context_tokens) != number:
                break
            yield number, one
            position = one.position + len(one.path) + 1


def count_acceptance(decoded: Iterable[Round]) -> AcceptanceCounts:
    """Acceptance counts over rounds, all in the region ``text``: a trace does not hold where images are."""
    counts = AcceptanceCounts()
    for one in decoded:
        if one.tree is not None:
            counts.observe(one.tree, one.path, is_near_image=False)
    return counts
