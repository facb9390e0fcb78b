"""``sage``: deep and narrow trees where the draft is confident, shallow and wide ones where it is not (SAGE, eq. 7-12,
algorithm 1, section 3.3).

The paper leaves several points open. These are hyperparameters of ``SagePolicy``:

* ``below_threshold``: section 3.2 says that a candidate is expanded if its probability exceeds the threshold
  (``leaf``), and that a path belongs to the tree if and only if it does (``drop``).
* ``threshold_on``: the threshold is compared with the cumulative probability of a path, or with the probability of its
  last token alone.
* ``rounding`` of D, W and W_l. "p_l < W_l" with indices from 0 and W_l not rounded is ``ceil``.
* ``plan`` and ``confidence``: algorithm 1 builds the tree of a round at the end of the round before (line 18, "using
  P_out, D, W, N_max"), from the distribution P_out that also gives the confidence (eq. 7 to 9). With
  ``plan="previous"`` P_out is the distribution after the root of the round before, and every node is expected to have
  children of its probabilities, by rank. The tree's shape is then known before drafting, and the draft only fills in
  tokens.
* ``depth_cap``: how far the acceptance history raises the maximum depth. The paper raises it and names no limit.

Other open points have one reading here. D and W of eq. 10 and 11 are rounded before eq. 12 and the threshold use them.
Level 1 is W wide, without the factor of eq. 12. A node that is expanded has at least one candidate. P_parent of eq. 12
is the cumulative probability of the parent. The maximum depth that the history moves, by one level a round once the
window is full, is D_max of eq. 10. A tree that reaches N_max keeps the most probable candidates of its last level. The
tree of the first round, of which the paper has a figure only (figure 4), is that of confidence 0.5.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from autotune.trees.base import ForestBounds, TreePolicy, TreeSize
from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, Floats
from autotune.trees.static import NO_TOKEN
from autotune.trees.tree import ROOT, Proposals, Tree, Workspace, add_best_children, add_child

MAX_WINDOW = 32
EPSILON = 1e-6
"""A number this close to an integer is that integer, rounded up or down: probabilities are float32."""

# params
_D_MIN, _D_MAX, _W_MIN, _W_MAX, _K, _N_MAX, _FROM_PREVIOUS, _DEPTH_CAP, _WINDOW, _LOWER, _UPPER = range(11)
_KEEPS_LEAVES, _THRESHOLD, _OF_TOKEN, _ROUNDING, _IS_PLANNED = range(11, 16)
_ROUNDINGS = {"nearest": 0, "floor": 1, "ceil": 2}
# state: depth limit, confidence of the last root, depth and width of this round, nodes of its planned shape, accepted
# lengths, log-probabilities of the last root's candidates
_LIMIT, _CONFIDENCE, _DEPTH, _WIDTH, _NUM_NODES, _NUM_SEEN, _FIRST_LENGTH = range(7)
_LAST_ROOT = _FIRST_LENGTH + MAX_WINDOW


class SagePolicy(TreePolicy):
    source: ClassVar[str] = "SAGE, section 5.1"
    ordered: ClassVar[tuple[tuple[str, str], ...]] = (
        ("d_min", "d_max"),
        ("d_min", "depth_cap"),
        ("w_min", "w_max"),
        ("lower", "upper"),
    )
    state_size: ClassVar[int] = _LAST_ROOT + MAX_CHILDREN

    policy: Literal["sage"] = "sage"
    d_min: int = Field(default=3, ge=1, le=MAX_DEPTH)
    d_max: int = Field(default=8, ge=1, le=MAX_DEPTH)
    w_min: int = Field(default=2, ge=1, le=MAX_CHILDREN)
    w_max: int = Field(default=10, ge=1, le=MAX_CHILDREN)
    k: int = Field(default=10, ge=2, le=MAX_CHILDREN)
    """Candidates that the entropy is taken over (eq. 7), and limit on a node's children."""
    n_max: int = Field(default=64, ge=1, le=MAX_NODES)
    """Limit on the draft nodes of a tree, the root not counted."""
    confidence: Literal["previous", "current"] = "previous"
    """Confidence of the round before (``previous``, the paper's) or of this round's root (``current``)."""
    depth_cap: int | None = Field(default=None, ge=1, le=MAX_DEPTH)
    """Highest depth limit that the acceptance history can reach; None: ``d_max``."""
    window: int = Field(default=10, ge=1, le=MAX_WINDOW)
    """Rounds of the acceptance history."""
    lower: float = Field(default=2.0, ge=0)
    """Mean accepted length below which the depth limit falls."""
    upper: float = Field(default=3.0, ge=0)
    """Mean accepted length above which the depth limit rises."""
    below_threshold: Literal["leaf", "drop"] = "leaf"
    """Treatment of a candidate that does not exceed its threshold: it is verified but has no children (``leaf``), or it
    is not in the tree (``drop``).
    """
    threshold: float = Field(default=0.1, ge=0, le=1)
    """Threshold of the last level; that of level l is ``threshold`` l / D."""
    threshold_on: Literal["path", "token"] = "path"
    """Probability that is compared with the threshold: the cumulative one, or the candidate's own."""
    rounding: Literal["nearest", "floor", "ceil"] = "nearest"
    """Rounding of D, W and W_l."""
    plan: Literal["current", "previous"] = "current"
    """Whether the probabilities of W_l, of the thresholds and of the choice under ``n_max`` are those of the nodes that
    the draft proposes in this round, or expected ones: those after the root of the round before, by rank; 1/2, 1/4, ...
    in the first round.
    """

    @property
    def keeps_empty_nodes(self) -> bool:
        return self.plan == "previous"

    @property
    def size(self) -> TreeSize:
        depth, nodes = max(self.d_max, self.depth_cap or 0), self.n_max
        return TreeSize(depth=depth, nodes=nodes, grown=nodes, width=nodes, proposals=self.k)

    @property
    def forest_bounds(self) -> ForestBounds:
        """Nodes above the threshold of section 3.2 in the deepest tree."""
        floor = max(self.threshold, 0.01) / self.size.depth
        return ForestBounds(depth=self.size.depth, num_proposals=self.size.proposals, floor=floor)

    def encode(self) -> Floats:
        words = {
            "confidence": self.confidence == "previous",
            "depth_cap": self.d_max if self.depth_cap is None else self.depth_cap,
            "below_threshold": self.below_threshold == "leaf",
            "threshold_on": self.threshold_on == "token",
            "rounding": _ROUNDINGS[self.rounding],
            "plan": self.plan == "previous",
        }
        return np.array([*(self.hyperparameters | words).values()], np.float64)


@compiled
def _round(value: float, rounding: float) -> int:
    if rounding == 0:
        return int(np.floor(value + 0.5))
    return int(np.floor(value + EPSILON) if rounding == 1 else np.ceil(value - EPSILON))


@compiled
def root_confidence(proposals: Proposals, row: int, k: int) -> float:
    """1 - H / log k of the renormalised top-k probabilities (eq. 7-9)."""
    total = weighted = 0.0
    for i in range(k):
        p = proposals[row, i].probability
        if p > 0.0:
            total += p
            weighted += p * proposals[row, i].logprob
    if total == 0.0:
        return 0.0  # the draft proposes nothing
    entropy = np.log(total) - weighted / total  # of p / total
    return min(1.0, max(0.0, 1.0 - entropy / np.log(k)))


@compiled
def reset(params: Floats, state: Floats) -> None:
    """Set confidence 0.5 (algorithm 1, line 3) and an empty history."""
    state[_LIMIT] = min(params[_D_MAX], params[_DEPTH_CAP])
    state[_CONFIDENCE] = 0.5
    state[_NUM_SEEN] = 0.0
    for rank in range(MAX_CHILDREN):
        state[_LAST_ROOT + rank] = -(rank + 1) * np.log(2.0)


@compiled
def _set_depth_and_width(params: Floats, state: Floats, confidence: float) -> None:
    depth = params[_D_MIN] + confidence * (state[_LIMIT] - params[_D_MIN])  # eq. 10
    width = params[_W_MIN] + (1.0 - confidence) * (params[_W_MAX] - params[_W_MIN])  # eq. 11
    state[_DEPTH], state[_WIDTH] = _round(depth, params[_ROUNDING]), _round(width, params[_ROUNDING])


@compiled
def _num_candidates(params: Floats, width: float, level: int, parent_probability: float) -> int:
    """Candidates of a node of the level above (eq. 12)."""
    if level > 1:
        width = max(1.0, _round(width / level * (0.5 + parent_probability), params[_ROUNDING]))
    return int(min(width, params[_K]))


@compiled
def _log_threshold(params: Floats, state: Floats, level: int) -> float:
    """Section 3.2."""
    return float(np.log(params[_THRESHOLD] * level / state[_DEPTH]))


@compiled
def plan(params: Floats, state: Floats, work: Workspace) -> int:
    """Plan the shape of a tree of the depth and width in ``state`` from the probabilities of the last root; returns the
    number of its nodes. Node i, from 1, has parent ``work.order[i]``, rank ``work.rank[i]`` and ``work.mark[i]``
    children.
    """
    drops, of_token = params[_KEEPS_LEAVES] == 0.0, params[_OF_TOKEN] == 1.0
    work.frontier[0] = work.mark[0] = 0
    work.score[0] = 0.0  # cumulative log-probability
    size, num_frontier, level = 1, 1, 1
    while num_frontier > 0 and level <= state[_DEPTH] and size <= params[_N_MAX]:
        threshold = _log_threshold(params, state, level)
        for i in range(num_frontier):
            count = _num_candidates(params, state[_WIDTH], level, np.exp(work.score[work.frontier[i]]))
            while drops and of_token and count > 0 and not state[_LAST_ROOT + count - 1] > threshold:
                count -= 1
            work.logprob[i] = count
        floor = threshold if drops and not of_token else -np.inf
        first = size
        while size <= params[_N_MAX]:
            parent, most = -1, floor
            for i in range(num_frontier):
                node = work.frontier[i]
                if work.mark[node] < work.logprob[i]:
                    value = work.score[node] + state[_LAST_ROOT + work.mark[node]]
                    if value > most:
                        parent, most = node, value
            if parent < 0:
                break
            work.order[size], work.rank[size], work.score[size] = parent, work.mark[parent], most
            work.mark[parent] += 1
            work.mark[size] = 0
            size += 1
        num_frontier = 0
        for node in range(first, size):
            compared = state[_LAST_ROOT + work.rank[node]] if of_token else work.score[node]
            if drops or compared > threshold:
                work.frontier[num_frontier] = node
                num_frontier += 1
        level += 1
    return size - 1


@compiled
def _begin_round(params: Floats, state: Floats, work: Workspace, proposals: Proposals, row: int) -> None:
    """Set depth and width, plan the shape where it is planned, and remember the root's probabilities."""
    k = min(int(params[_K]), proposals.shape[1])
    confidence = root_confidence(proposals, row, k)
    _set_depth_and_width(params, state, state[_CONFIDENCE] if params[_FROM_PREVIOUS] else confidence)
    state[_CONFIDENCE] = confidence
    if params[_IS_PLANNED]:
        state[_NUM_NODES] = plan(params, state, work)
        work.frontier[0] = ROOT
        for rank in range(MAX_CHILDREN):
            state[_LAST_ROOT + rank] = proposals[row, rank].logprob if rank < k else -np.inf


@compiled
def _grow_planned(num_nodes: float, level: int, tree: Tree, work: Workspace, proposals: Proposals) -> int:
    num_next = 0
    node = tree.size[0]
    while node <= num_nodes and tree.depth[work.order[node]] + 1 == level:
        add_child(tree, work.order[node], work.rank[node], proposals)
        if tree.path_logprob[node] == -np.inf:
            tree.token[node] = NO_TOKEN
        if work.mark[node] > 0:
            work.frontier[num_next] = node
            num_next += 1
        node += 1
    return num_next


@compiled
def grow(params: Floats, state: Floats, tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals) -> int:
    """Add one level of children of the frontier; returns the number of nodes to expand next (written to the
    frontier).
    """
    level = tree.depth[work.frontier[0]] + 1
    if level == 1:
        _begin_round(params, state, work, proposals, tree.row[0])
    if params[_IS_PLANNED]:
        return _grow_planned(state[_NUM_NODES], level, tree, work, proposals)
    k, drops, of_token = proposals.shape[1], params[_KEEPS_LEAVES] == 0.0, params[_OF_TOKEN] == 1.0
    threshold = _log_threshold(params, state, level)
    for i in range(num_frontier):
        node = work.frontier[i]
        count = min(k, _num_candidates(params, state[_WIDTH], level, tree.path_probability[node]))
        while drops and of_token and count > 0 and not proposals[tree.row[node], count - 1].logprob > threshold:
            count -= 1
        work.mark[i] = count
    room = int(params[_N_MAX]) + 1 - tree.size[0]
    first = tree.size[0]
    floor = threshold if drops and not of_token else -np.inf
    num_new = add_best_children(tree, work, num_frontier, proposals, room, floor)
    if level >= state[_DEPTH] or tree.size[0] > params[_N_MAX]:
        return 0  # a full tree has no room for children
    num_next = 0
    for node in range(first, first + num_new):
        compared = tree.path_logprob[node]
        if of_token:
            compared = proposals[tree.row[tree.parent[node]], tree.rank[node]].logprob
        if drops or compared > threshold:
            work.frontier[num_next] = node
            num_next += 1
    return num_next


@compiled
def update(params: Floats, state: Floats, accepted: int) -> None:
    """Move the depth limit by one according to the mean of the last accepted lengths (section 3.3)."""
    window = int(params[_WINDOW])
    seen = int(state[_NUM_SEEN])
    state[_FIRST_LENGTH + seen % window] = accepted
    state[_NUM_SEEN] = seen + 1
    if seen + 1 < window:
        return
    mean = 0.0
    for i in range(window):
        mean += state[_FIRST_LENGTH + i]
    mean /= window
    if mean < params[_LOWER]:
        state[_LIMIT] -= 1.0
    elif mean > params[_UPPER]:
        state[_LIMIT] += 1.0
    state[_LIMIT] = min(max(state[_LIMIT], params[_D_MIN]), params[_DEPTH_CAP])
