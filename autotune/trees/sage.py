"""``sage``: deep and narrow where the draft is sure, shallow and wide where it is not (SAGE, eq. 7-12, algorithm 1,
section 3.3).

Where the paper is open we read it so: D and W are rounded to the nearest integer; level 1 is W wide; P_parent in eq. 12
is, like P in the threshold, the cumulative probability from the root; D_max in eq. 10 is the limit that the acceptance
history moves.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from autotune.files import Document
from autotune.trees.tree import Floats, Proposals, Tree, Workspace, add_best_children, compiled

MAX_WINDOW = 32

# params: hyperparameters in this order
_D_MIN, _D_MAX, _W_MIN, _W_MAX, _K, _N_MAX, _FROM_PREVIOUS, _DEPTH_CAP, _WINDOW, _LOWER, _UPPER = range(11)
# state: what is remembered between rounds, and the round's own depth and width
_LIMIT, _CONFIDENCE, _DEPTH, _WIDTH, _NUM_SEEN, _FIRST_LENGTH = range(6)
STATE_SIZE = _FIRST_LENGTH + MAX_WINDOW


class SagePolicy(Document):
    """Hyperparameters of ``sage``; the defaults are the paper's (section 5.1)."""

    KIND: ClassVar[int] = 1
    policy: Literal["sage"] = "sage"
    d_min: int = Field(default=3, ge=1, le=24)
    d_max: int = Field(default=8, ge=1, le=24)
    w_min: int = Field(default=2, ge=1, le=16)
    w_max: int = Field(default=10, ge=1, le=16)
    k: int = Field(default=10, ge=2, le=16)
    """Candidates of the entropy (eq. 7), and most children of a node."""
    n_max: int = Field(default=64, ge=1, le=128)
    """Most draft nodes of a tree, the root not counted."""
    confidence: Literal["previous", "current"] = "previous"
    """``previous``: from the round before, as in the paper; ``current``: from this round's root."""
    depth_cap: int | None = Field(default=None, ge=1, le=24)
    """How far history may raise the depth limit; d_max where left out."""
    window: int = Field(default=10, ge=1, le=MAX_WINDOW)
    lower: float = Field(default=2.0, ge=0)
    upper: float = Field(default=3.0, ge=0)

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> SagePolicy:
        for low, high in (("d_min", "d_max"), ("w_min", "w_max"), ("lower", "upper")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} must be at most {high}, which is {getattr(self, high)}")
        if self.depth_cap is not None and self.depth_cap < self.d_min:
            raise ValueError(f"depth_cap must be at least d_min, which is {self.d_min}")
        return self

    @property
    def max_nodes(self) -> int:
        return self.n_max

    @property
    def max_grown(self) -> int:
        return self.n_max

    @property
    def max_width(self) -> int:
        return self.n_max

    @property
    def max_depth(self) -> int:
        return max(self.d_max, self.depth_cap or 0)

    @property
    def num_proposals(self) -> int:
        return self.k

    def encode(self) -> Floats:
        cap = self.d_max if self.depth_cap is None else self.depth_cap
        numbers = [
            self.d_min,
            self.d_max,
            self.w_min,
            self.w_max,
            self.k,
            self.n_max,
            self.confidence == "previous",
            cap,
        ]
        return np.array([*numbers, self.window, self.lower, self.upper], np.float64)


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
        return 0.0  # the draft has no idea
    entropy = np.log(total) - weighted / total  # of p / total
    return min(1.0, max(0.0, 1.0 - entropy / np.log(k)))


@compiled
def reset(params: Floats, state: Floats) -> None:
    """Algorithm 1, line 3: confidence 0.5, and no history."""
    state[_LIMIT] = min(params[_D_MAX], params[_DEPTH_CAP])
    state[_CONFIDENCE] = 0.5
    state[_NUM_SEEN] = 0.0


@compiled
def grow(params: Floats, state: Floats, tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals) -> int:
    """One level: from the frontier's proposals to its children kept; returns how many of them to expand next (written
    to the frontier).
    """
    level = tree.depth[work.frontier[0]] + 1
    k = min(int(params[_K]), proposals.shape[1])
    if level == 1:
        confidence = root_confidence(proposals, tree.row[0], k)
        used = state[_CONFIDENCE] if params[_FROM_PREVIOUS] else confidence
        state[_CONFIDENCE] = confidence
        state[_DEPTH] = _round(params[_D_MIN] + used * (state[_LIMIT] - params[_D_MIN]))  # eq. 10
        state[_WIDTH] = _round(params[_W_MIN] + (1.0 - used) * (params[_W_MAX] - params[_W_MIN]))  # eq. 11
    depth, width = state[_DEPTH], state[_WIDTH]
    threshold = np.log(0.1 * level / depth)  # section 3.2, of the cumulative probability

    for i in range(num_frontier):
        parent_probability = tree.path_probability[work.frontier[i]]
        children = (
            width if level == 1 else max(1.0, np.floor(width / level * (0.5 + parent_probability) + 0.5))
        )  # eq. 12
        work.mark[i] = min(int(children), k)
    room = int(params[_N_MAX]) + 1 - tree.size[0]
    first = tree.size[0]
    num_new = add_best_children(tree, work, num_frontier, proposals, room, threshold)
    if level >= depth or tree.size[0] > params[_N_MAX]:
        return 0  # in a full tree nothing that is expanded now could be added
    for place in range(num_new):
        work.frontier[place] = first + place
    return num_new


@compiled
def update(params: Floats, state: Floats, accepted: int) -> None:
    """Adaptive history tracking (section 3.3): the mean of the last accepted lengths moves the depth limit by one."""
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
