"""Selects the groups of requests that get an operating point of their own.

With many configurations and few requests, the best configuration is partly the best by chance. A group of requests
therefore gets its own point only if the configuration chosen on one half of the group beats the common one on the other
half: by a minimum gain, and significantly. Groups are split in halves many times; because the halves overlap, the
variance of the mean gain is corrected (Nadeau and Bengio 2003, "Inference for the generalization error"). The significance
level is divided by the number of groups tried (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.documents.condition import Condition, Range
from autotune.trees.limits import Floats, Ints

Flags = NDArray[np.bool_]

MIN_GAIN = 0.02  # share of the decoding time that a point must save
MIN_REQUESTS = 6  # of a group
RISK = 0.05  # that any group gets a point by chance
NUM_SPLITS = 50
LENGTH_QUANTILES = (0.25, 0.5, 0.75)  # of the prompts' lengths: candidates for the boundary between short and long


class Group(NamedTuple):
    condition: Condition
    is_member: Flags
    """[requests]"""


Grouping = tuple[Group, ...]
"""Disjoint groups of requests."""


class Point(NamedTuple):
    """Requests that meet ``condition``, and no earlier point's, are decoded with ``configuration``."""

    condition: Condition
    configuration: int
    """Row of the decoding times."""
    gain: float
    """Share of the group's decoding time saved against the common configuration, on held-out halves; 0 for that one."""


def by_workload(tags: Sequence[str]) -> Grouping:
    """One group per tag."""
    names = np.array(tags)
    return tuple(Group(Condition(workload=name), names == name) for name in dict.fromkeys(tags))


def by_prompt_tokens(lengths: Sequence[int]) -> list[Grouping]:
    """Short and long prompts, with the boundary at each of ``LENGTH_QUANTILES``."""
    tokens = np.array(lengths)
    quantiles = {int(np.quantile(tokens, share, method="lower")) for share in LENGTH_QUANTILES}
    return [
        (
            Group(Condition(prompt_tokens=Range(max=longest)), tokens <= longest),
            Group(Condition(prompt_tokens=Range(min=longest + 1)), tokens > longest),
        )
        for longest in sorted(quantiles - {int(tokens.max())})
    ]


def by_temperature(temperatures: Sequence[float]) -> Grouping:
    """One group per recorded temperature; other temperatures belong to the nearest of them."""
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
    """The points of the grouping that saves most time; the last one decodes all remaining requests.

    Args:
        ms: predicted decoding times [configurations, requests]. All configurations emit the same tokens. Plain decoding
            should be among them.
        groupings: of the same requests; at most one is used.
        common: row of the configuration for requests without a point of their own.
        min_gain: share of a group's decoding time that its point must save.
        min_requests: smallest size of a group.
        seed: of the splits.
    """
    best = [Point(Condition(), common, 0.0)]
    best_saved_ms = 0.0
    sizes = [int(group.is_member.sum()) for grouping in groupings for group in grouping]
    num_tried = max(1, sum(size >= min_requests for size in sizes))
    min_deviations = NormalDist().inv_cdf(1 - RISK / num_tried)
    for grouping in groupings:
        points, saved_ms = [], 0.0
        for group in grouping:
            members = np.flatnonzero(group.is_member)
            total_ms = float(ms[common, members].sum())
            if len(members) < max(2, min_requests) or total_ms == 0.0:
                continue
            gain, deviation = _gain(ms, members, common, seed)
            if gain >= min_gain and gain > min_deviations * deviation:
                points.append(Point(group.condition, _fastest(ms, members), gain))
                saved_ms += gain * total_ms
        if saved_ms > best_saved_ms:
            best, best_saved_ms = [*points, Point(Condition(), common, 0.0)], saved_ms
    return best


def _gain(ms: Floats, members: Ints, common: int, seed: int) -> tuple[float, float]:
    """Share of the members' decoding time that their own configuration saves, and its standard deviation."""
    rng = np.random.default_rng(seed)
    gains = np.zeros(NUM_SPLITS)
    for split in range(NUM_SPLITS):
        order = rng.permutation(members)
        choosing, held_out = order[: len(order) // 2], order[len(order) // 2 :]
        own_ms = ms[_fastest(ms, choosing), held_out]
        gains[split] = 1 - own_ms.sum() / max(ms[common, held_out].sum(), 1e-9)
    # Nadeau and Bengio: with halves of equal size, (1 / splits + 1) times the sample variance.
    return float(gains.mean()), float(gains.std(ddof=1)) * (1 / NUM_SPLITS + 1) ** 0.5


def _fastest(ms: Floats, requests: Ints) -> int:
    """The configuration with the least total time; the first of equally fast ones."""
    return int(ms[:, requests].sum(1).argmin())
