"""SAGE in plain Python, written from the paper alone, with every reading that ``SagePolicy`` offers.

A node is the path of ranks that leads to it. A draft is given as a function from a path to the log-probabilities of its
candidates, most probable first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Path = tuple[int, ...]
Draft = Callable[[Path], list[float]]


@dataclass
class ReferenceSage:
    """Rounds of one request."""

    # Section 5.1.
    d_min: int = 3
    d_max: int = 8
    w_min: int = 2
    w_max: int = 10
    k: int = 10
    n_max: int = 64
    window: int = 10
    lower: float = 2.0
    upper: float = 3.0
    # Readings.
    confidence: str = "previous"
    below_threshold: str = "leaf"
    threshold: float = 0.1
    threshold_on: str = "path"
    rounding: str = "nearest"
    plan: str = "current"
    depth_cap: int = 10

    alpha: float = 0.5
    """Algorithm 1, line 3."""
    p_out: list[float] = field(default_factory=list)
    """Log-probabilities after the root of the round before."""
    accepted: list[int] = field(default_factory=list)
    limit: int = 0
    """D_max as the history has moved it."""

    def __post_init__(self) -> None:
        self.limit = min(self.d_max, self.depth_cap)
        self.p_out = [math.log(0.5) * rank for rank in range(1, self.k + 1)]

    # -------- equations

    def confidence_of(self, logprobs: list[float]) -> float:
        """Equations 7 to 9."""
        p = [math.exp(logprob) for logprob in logprobs[: self.k]]
        if sum(p) == 0:
            return 0.0
        p_tilde = [each / sum(p) for each in p]
        entropy = -sum(each * math.log(each) for each in p_tilde if each > 0)
        return min(1.0, max(0.0, 1 - entropy / math.log(self.k)))

    def rounded(self, value: float) -> int:
        if abs(value - round(value)) < 1e-6:
            return round(value)
        return {"nearest": math.floor(value + 0.5), "floor": math.floor(value), "ceil": math.ceil(value)}[self.rounding]

    def depth(self, alpha: float) -> int:
        """Equation 10."""
        return self.rounded(self.d_min + alpha * (self.limit - self.d_min))

    def width(self, alpha: float) -> int:
        """Equation 11."""
        return self.rounded(self.w_min + (1 - alpha) * (self.w_max - self.w_min))

    def level_width(self, width: int, level: int, p_parent: float) -> int:
        """Equation 12, beyond the first level."""
        if level > 1:
            width = max(1, self.rounded(width / level * (0.5 + p_parent)))
        return min(width, self.k)

    # -------- tree

    def construct(self, depth: int, width: int, draft: Draft) -> tuple[list[Path], list[Path]]:
        """Section 3.2: the nodes of the tree, and the candidates whose subtrees are to be expanded, level by level."""
        cumulative: dict[Path, float] = {(): 0.0}
        parents: list[Path] = [()]
        tree: list[Path] = []
        expanded: list[Path] = []
        for level in range(1, depth + 1):
            theta = self.threshold * level / depth
            log_theta = math.log(theta) if theta > 0 else -math.inf
            candidates: list[tuple[float, int, Path, bool]] = []
            for order, parent in enumerate(parents):
                logprobs = draft(parent)
                for rank in range(self.level_width(width, level, math.exp(cumulative[parent]))):
                    total = cumulative[parent] + logprobs[rank]
                    exceeds = (total if self.threshold_on == "path" else logprobs[rank]) > log_theta
                    if total > -math.inf and (exceeds or self.below_threshold == "leaf"):
                        candidates.append((-total, order, (*parent, rank), exceeds))
            candidates = sorted(candidates)[: self.n_max - len(tree)]
            tree += [path for _, _, path, _ in candidates]
            cumulative |= {path: -negative for negative, _, path, _ in candidates}
            parents = [path for _, _, path, exceeds in candidates if exceeds]
            if level == depth or len(tree) == self.n_max:
                break
            expanded += parents
        return tree, expanded

    # -------- algorithm

    def round(self, draft: Draft) -> tuple[set[Path], set[Path]]:
        """The tree of a round, and the nodes that the draft reads besides the root."""
        own = self.confidence_of(draft(()))
        alpha = self.alpha if self.confidence == "previous" else own
        depth, width = self.depth(alpha), self.width(alpha)
        if self.plan == "previous":
            tree, _ = self.construct(depth, width, lambda path: self.p_out)
            read = {path[:-1] for path in tree} - {()}  # the shape is known, so only parents are read
        else:
            tree, expanded = self.construct(depth, width, draft)
            read = set(expanded)
        self.alpha, self.p_out = own, draft(())[: self.k]
        return set(tree), read

    def verify(self, accepted: int) -> None:
        """Section 3.3, adaptive history tracking."""
        self.accepted.append(accepted)
        if len(self.accepted) < self.window:
            return
        average = sum(self.accepted[-self.window :]) / self.window
        if average < self.lower:
            self.limit = max(self.d_min, self.limit - 1)
        elif average > self.upper:
            self.limit = min(self.depth_cap, self.limit + 1)
