"""``wetap``: the entropy of a level sets the width of the next; over budget, nodes are kept for their probability and
their depth (WETAP, eq. 3-8, algorithm 1, appendix D).

Where the paper is open: the probabilities of eq. 3 are cumulative as those of eq. 7 (algorithm 1 has one q_i for both),
or the tokens' own (``entropy_of``); p_min and p_max of eq. 7 are those of the grown tree; W_t of eq. 6 is the number of
nodes that level t really has; widths are rounded to the nearest integer. A parent's candidates are those that
transformers' warpers leave: its ``top_k`` best, of which those are taken whose better ones have less than ``top_p`` of
the probability, renormalised over the ``top_k``; at least one. After missing parents have been added back, one pass
drops leaves above the last level, from shallow to deep and the least probable of a level first; then the least probable
nodes of all are dropped.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from autotune.trees.base import ForestBounds, TreePolicy, TreeSize
from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, MAX_WIDTH, Floats
from autotune.trees.tree import ROOT, Proposals, Tree, Workspace, add_best_children, best_first, keep_marked

_LENGTH, _W_MIN, _W_MAX, _GAMMA, _ALPHA, _BUDGET, _TOP_K, _TOP_P, _IS_RENORMALISED, _OF_TOKEN = range(10)  # params
_WIDTH = 0  # state: width of the next level
EPSILON = 1e-12  # eq. 7


class WetapPolicy(TreePolicy):
    source: ClassVar[str] = "WETAP, appendix B.4 and sections 4.4.1 to 4.4.3"
    ordered: ClassVar[tuple[tuple[str, str], ...]] = (("w_min", "w_max"),)
    state_size: ClassVar[int] = 1

    policy: Literal["wetap"] = "wetap"
    length: int = Field(default=8, ge=1, le=MAX_DEPTH)
    """Draft levels."""
    w_min: int = Field(default=16, ge=1, le=MAX_WIDTH)
    w_max: int = Field(default=128, ge=1, le=MAX_WIDTH)
    gamma: float = Field(default=1.2, gt=0)
    """Exponent from entropy to width (eq. 5)."""
    alpha: float = Field(default=0.6, ge=0, le=1)
    """Weight of probability against depth in pruning (eq. 8)."""
    budget: int = Field(default=64, ge=1, le=MAX_NODES)
    """Limit on the draft nodes sent to verification, the root not counted."""
    top_k: int = Field(default=10, ge=1, le=MAX_CHILDREN)
    top_p: float = Field(default=0.9, gt=0, le=1)
    nucleus: Literal["top_k", "all"] = "top_k"
    """Mass that ``top_p`` is a share of: the probability of the ``top_k`` best candidates, as transformers cuts, or of
    all tokens.
    """
    entropy_of: Literal["path", "token"] = "path"
    """Probabilities whose entropy sets the next width (eq. 3): the cumulative ones, or the tokens' own."""

    @property
    def size(self) -> TreeSize:
        grown = min(self.w_min, self.top_k) + (self.length - 1) * self.w_max
        return TreeSize(self.length, nodes=min(self.budget, grown), grown=grown, width=self.w_max, proposals=self.top_k)

    def encode(self) -> Floats:
        words = {"nucleus": self.nucleus == "top_k", "entropy_of": self.entropy_of == "token"}
        return np.array(list((self.hyperparameters | words).values()), np.float64)

    @property
    def forest_bounds(self) -> ForestBounds:
        nucleus = {"nucleus": self.top_p, "nucleus_width": self.w_max, "nucleus_depth": self.length}
        return super().forest_bounds.model_copy(update={**nucleus, "is_renormalised": self.nucleus == "top_k"})


@compiled
def next_width(params: Floats, tree: Tree, first: int) -> int:
    """Width of the next level, from the probabilities of this level's nodes, ``first`` and after (eq. 3-6)."""
    nodes = tree.size[0] - first
    total = weighted = 0.0
    for node in range(first, tree.size[0]):
        probability, logprob = tree.path_probability[node], tree.path_logprob[node]
        if params[_OF_TOKEN] == 1.0:
            logprob -= tree.path_logprob[tree.parent[node]]
            probability = np.exp(logprob)
        total += probability
        weighted += probability * logprob
    normalised = 0.0
    if nodes > 1 and total > 0.0:
        entropy = np.log(total) - weighted / total  # of p / total
        normalised = min(1.0, max(0.0, entropy / np.log(nodes)))
    width = params[_W_MIN] + (params[_W_MAX] - params[_W_MIN]) * normalised ** params[_GAMMA]
    return int(np.floor(width + 0.5))


@compiled
def grow(params: Floats, state: Floats, tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals) -> int:
    """Add the best candidates of all parents; returns the number of nodes to expand next (written to the frontier)."""
    level = tree.depth[work.frontier[0]] + 1
    k = min(int(params[_TOP_K]), proposals.shape[1])
    if level == 1:
        state[_WIDTH] = params[_W_MIN]
    for i in range(num_frontier):
        row = tree.row[work.frontier[i]]
        limit, mass, count = params[_TOP_P], 0.0, 0
        if params[_IS_RENORMALISED] == 1.0:
            total = 0.0
            for rank in range(k):
                total += proposals[row, rank].probability
            limit *= total
        while count < k and mass < limit:
            mass += proposals[row, count].probability
            count += 1
        work.mark[i] = count
    first = tree.size[0]
    num_new = add_best_children(tree, work, num_frontier, proposals, int(state[_WIDTH]), -np.inf)
    if num_new == 0 or level >= params[_LENGTH]:
        return 0
    for i in range(num_new):
        work.frontier[i] = first + i
    state[_WIDTH] = next_width(params, tree, first)
    return num_new


@compiled
def prune(params: Floats, tree: Tree, work: Workspace) -> None:
    """Prune to the budget by probability and depth (eq. 7-8, section 3.2.2, appendix D)."""
    budget, length, alpha = int(params[_BUDGET]), params[_LENGTH], params[_ALPHA]
    size = tree.size[0]
    if size - 1 <= budget:
        return
    # Keep the best by joint score; ``score[i]`` belongs to node i + 1.
    least, most = np.inf, -np.inf
    for node in range(1, size):
        p = tree.path_probability[node]
        least, most = min(least, p), max(most, p)
    for node in range(1, size):
        normalised = (tree.path_probability[node] - least) / (most - least + EPSILON)
        work.score[node - 1] = alpha * normalised + (1.0 - alpha) * tree.depth[node] / length
    best_first(work.score, size - 1, budget, work.order)
    # ``mark`` is 1 plus the number of kept children of a kept node, so 1 is a leaf; it is 0 for a dropped node.
    mark = work.mark
    mark[:size] = 0
    for i in range(budget):
        mark[work.order[i] + 1] = 1
    # Add missing parents back.
    num_kept = 0
    for node in range(size - 1, ROOT, -1):
        if mark[node] > 0:
            num_kept += 1
            parent = tree.parent[node]
            if parent != ROOT:
                mark[parent] = max(1, mark[parent]) + 1
    # Drop leaves from shallow to deep; the nodes of a level are contiguous, most probable first.
    first = 1
    while num_kept > budget and first < size:
        end = first
        while end < size and tree.depth[end] == tree.depth[first]:
            end += 1
        if tree.depth[first] < tree.depth[size - 1]:
            for node in range(end - 1, first - 1, -1):
                if mark[node] == 1 and num_kept > budget:
                    mark[node] = 0
                    num_kept -= 1
        first = end
    # Drop the least probable nodes, the later of equal ones, so that no parent is dropped before its child.
    if num_kept > budget:
        count = 0
        for node in range(1, size):
            if mark[node] > 0:
                work.logprob[count] = tree.path_logprob[node]
                work.rank[count] = node
                count += 1
        best_first(work.logprob, count, budget, work.order)
        mark[:size] = 0
        for i in range(budget):
            mark[work.rank[work.order[i]]] = 1
    keep_marked(tree, mark)
