"""``sage``: deep and narrow trees where the draft is confident, shallow and wide ones where it is not (SAGE, eq. 7-12,
algorithm 1, section 3.3).

Where the paper is open: D and W are rounded to the nearest integer; level 1 is W wide; P_parent in eq. 12 is, like P in
the threshold, the cumulative probability from the root; the acceptance history moves D_max of eq. 10.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from autotune.trees.base import BasePolicy, ForestBounds, Limits
from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, Floats
from autotune.trees.tree import Proposals, Tree, Workspace, add_best_children

MAX_WINDOW = 32

# params
_D_MIN, _D_MAX, _W_MIN, _W_MAX, _K, _N_MAX, _FROM_PREVIOUS, _DEPTH_CAP, _WINDOW, _LOWER, _UPPER = range(11)
# state: depth limit, confidence of the last root, depth and width of this round, accepted lengths of the last rounds
_LIMIT, _CONFIDENCE, _DEPTH, _WIDTH, _NUM_SEEN, _FIRST_LENGTH = range(6)
STATE_SIZE = _FIRST_LENGTH + MAX_WINDOW


class SagePolicy(BasePolicy):
    """Hyperparameters of ``sage``."""

    KIND: ClassVar[int] = 1
    source: ClassVar[str] = "SAGE, section 5.1"
    ordered: ClassVar[tuple[tuple[str, str], ...]] = (
        ("d_min", "d_max"),
        ("d_min", "depth_cap"),
        ("w_min", "w_max"),
        ("lower", "upper"),
    )

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

    @property
    def limits(self) -> Limits:
        depth = max(self.d_max, self.depth_cap or 0)
        return Limits(depth=depth, nodes=self.n_max, grown=self.n_max, width=self.n_max, proposals=self.k)

    @property
    def forest_bounds(self) -> ForestBounds:
        """Nodes above the threshold of section 3.2 in the deepest tree."""
        return ForestBounds(depth=self.max_depth, num_proposals=self.k, floor=0.1 / self.max_depth)

    def encode(self) -> Floats:
        cap = self.d_max if self.depth_cap is None else self.depth_cap
        numbers = self.hyperparameters | {"confidence": self.confidence == "previous", "depth_cap": cap}
        return np.array(list(numbers.values()), np.float64)


@compiled
def _round(value: float) -> int:
    return int(np.floor(value + 0.5))


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


@compiled
def grow(params: Floats, state: Floats, tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals) -> int:
    """Add one level of children of the frontier; returns the number of nodes to expand next (written to the frontier)."""
    level = tree.depth[work.frontier[0]] + 1
    k = min(int(params[_K]), proposals.shape[1])
    if level == 1:
        confidence = root_confidence(proposals, tree.row[0], k)
        used = state[_CONFIDENCE] if params[_FROM_PREVIOUS] else confidence
        state[_CONFIDENCE] = confidence
        state[_DEPTH] = _round(params[_D_MIN] + used * (state[_LIMIT] - params[_D_MIN]))  # eq. 10
        state[_WIDTH] = _round(params[_W_MIN] + (1.0 - used) * (params[_W_MAX] - params[_W_MIN]))  # eq. 11
    depth, width = state[_DEPTH], state[_WIDTH]
    threshold = np.log(0.1 * level / depth)  # of the cumulative probability, section 3.2

    for i in range(num_frontier):
        parent_probability = tree.path_probability[work.frontier[i]]
        children = width
        if level > 1:
            children = max(1.0, np.floor(width / level * (0.5 + parent_probability) + 0.5))  # eq. 12
        work.mark[i] = min(int(children), k)
    room = int(params[_N_MAX]) + 1 - tree.size[0]
    first = tree.size[0]
    num_new = add_best_children(tree, work, num_frontier, proposals, room, threshold)
    if level >= depth or tree.size[0] > params[_N_MAX]:
        return 0  # a full tree has no room for children
    for i in range(num_new):
        work.frontier[i] = first + i
    return num_new


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
