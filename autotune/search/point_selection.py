"""Which kinds of requests deserve an operating point of their own.

Where many configurations are compared on few requests, the best of them is best by luck in part. So a group of requests
gets a point only if its own choice, made on one half of the group, beats the best single configuration on the other
half: by a minimum, and by more than chance. Groups are halved many times; as the halves share requests, what they say
spreads too little, which the variance is corrected for (Nadeau and Bengio 2003, "Inference for the generalization
error"). The bound is the stricter the more groups are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.documents.condition import Condition, Range

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]

MIN_GAIN = 0.02
"""Share of decoding time that a point must save."""
MIN_REQUESTS = 6
"""Of a group: fewer say nothing."""
RISK = 0.05
"""That any of the groups tried gets a point by chance."""
NUM_HALVINGS = 50
QUANTILES = (0.25, 0.5, 0.75)
"""Of the prompts' lengths: where they are split."""


class Group(NamedTuple):
    """Requests of one kind."""

    condition: Condition
    is_member: Flags
    """Of every request."""


Grouping = tuple[Group, ...]
"""One way to tell requests apart: into groups that have no request in common."""


class Point(NamedTuple):
    """Decode requests that meet ``condition``, and no earlier point's, with ``configuration``."""

    condition: Condition
    configuration: int
    """Row of the times."""
    gain: float
    """Share of its requests' decoding time saved against the common configuration, on requests that did not choose; 0
    for that one.
    """


def by_workload(tags: Sequence[str]) -> Grouping:
    """By the requests' tags; others may come."""
    names = np.array(tags)
    return tuple(Group(Condition(workload=name), names == name) for name in dict.fromkeys(tags))


def by_prompt_tokens(lengths: Sequence[int]) -> list[Grouping]:
    """Into short and long prompts, at each of the quantiles."""
    tokens = np.array(lengths)
    thresholds = sorted({int(np.quantile(tokens, share, method="lower")) for share in QUANTILES} - {int(tokens.max())})
    return [
        (
            Group(Condition(prompt_tokens=Range(max=longest)), tokens <= longest),
            Group(Condition(prompt_tokens=Range(min=longest + 1)), tokens > longest),
        )
        for longest in thresholds
    ]


def by_temperature(temperatures: Sequence[float]) -> Grouping:
    """By temperature: every request belongs to the nearest of those recorded."""
    recorded = np.array(temperatures)
    known = np.unique(recorded)
    between = [float(middle) for middle in (known[1:] + known[:-1]) / 2]
    return tuple(
        Group(Condition(temperature=Range(min=low, max=high)), recorded == value)
        for low, value, high in zip([None, *between], known, [*between, None], strict=True)
        if (low, high) != (None, None)
    )


def choose_points(
    ms: Floats,
    groupings: Sequence[Grouping],
    common: int,
    *,
    min_gain: float = MIN_GAIN,
    min_requests: int = MIN_REQUESTS,
    seed: int = 0,
) -> list[Point]:
    """The points of the grouping that saves most time, in order, the one for all other requests last; only that one where
    no group gains enough.

    Args:
        ms: predicted decoding times [configurations, requests]. Every configuration emits the same tokens, so that times are
            all that differs; of equally fast ones the first is chosen. Plain decoding should be among them.
        groupings: of the same requests, of which one may be used.
        common: row of what decodes all requests that have no point of their own.
        min_gain: share of a group's decoding time that its point must save.
        min_requests: that a group must have.
    """
    best = [Point(Condition(), common, 0.0)]
    saved_ms = 0.0
    sizes = [int(group.is_member.sum()) for grouping in groupings for group in grouping]
    num_tried = max(1, sum(size >= min_requests for size in sizes))
    for grouping in groupings:
        judge = _Judge(ms, common, min_gain, min_requests, RISK / num_tried, seed)
        points, saved = _points_of(ms, grouping, judge)
        if saved > saved_ms:
            best, saved_ms = points, saved
    return best


def _points_of(ms: Floats, grouping: Grouping, judge: _Judge) -> tuple[list[Point], float]:
    """A grouping's points, and the milliseconds that they save on requests that did not choose."""
    points, saved_ms = [], 0.0
    for group in grouping:
        gain, saved = judge.gain(group.is_member)
        if gain > 0.0:
            points.append(Point(group.condition, _best(ms, group.is_member), gain))
            saved_ms += saved
    return [*points, Point(Condition(), judge.common, 0.0)], saved_ms


class _Judge:
    """Tries groups of requests on halves that did not choose."""

    def __init__(self, ms: Floats, common: int, min_gain: float, min_requests: int, risk: float, seed: int) -> None:
        self.ms = ms
        self.common = common
        self.min_gain = min_gain
        self.min_requests = min_requests
        self.num_deviations = NormalDist().inv_cdf(1 - risk)
        self.seed = seed

    def gain(self, is_member: Flags) -> tuple[float, float]:
        """The share of the group's time that a point of its own saves, and the milliseconds; zeros where that is too little,
        or may be chance.
        """
        members = np.flatnonzero(is_member)
        total_ms = float(self.ms[self.common, members].sum())
        if len(members) < max(2, self.min_requests) or total_ms == 0.0:
            return 0.0, 0.0
        rng = np.random.default_rng(self.seed)
        gains = np.zeros(NUM_HALVINGS)
        for number in range(NUM_HALVINGS):
            order = rng.permutation(members)
            choosing, selection = order[: len(order) // 2], order[len(order) // 2 :]
            own_ms = self.ms[_best(self.ms, choosing), selection]
            gains[number] = 1 - own_ms.sum() / max(self.ms[self.common, selection].sum(), 1e-9)
        gain = float(gains.mean())
        # Halves as large as those that judge have chosen: the variance of the mean is (1 / halvings + 1) times that seen.
        deviation = float(gains.std(ddof=1)) * (1 / NUM_HALVINGS + 1) ** 0.5
        is_certain = gain > self.num_deviations * deviation
        return (gain, gain * total_ms) if gain >= self.min_gain and is_certain else (0.0, 0.0)


def _best(ms: Floats, requests: Ints | Flags | slice = slice(None)) -> int:
    """The configuration that decodes the requests fastest."""
    return int(ms[:, requests].sum(1).argmin())
