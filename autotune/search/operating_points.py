"""Operating points from replay: conditions under which another configuration than the common one is faster.

With many configurations and few requests, the best configuration is partly the best by chance. A group of requests
therefore gets its own point only if the configuration chosen on one half of the group beats the common one on the other
half: by a minimum gain, and significantly. Groups are split in halves many times; because the halves overlap, the
variance of the mean gain is corrected (Nadeau and Bengio 2003, "Inference for the generalization error"). The
significance level is divided by the number of groups tried (Bonferroni).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.documents.condition import Condition, Range
from autotune.search import thresholds
from autotune.trees.limits import Floats, Ints

Flags = NDArray[np.bool_]


class Group(NamedTuple):
    condition: Condition
    is_member: Flags
    """[requests]"""


Grouping = tuple[Group, ...]
"""Disjoint groups of requests."""


class Proposal(NamedTuple):
    """Requests that meet ``condition``, and no earlier point's, are decoded with ``configuration``."""

    condition: Condition
    configuration: int
    """Row of the decoding times."""
    gain: float
    """Share of the group's decoding time saved against the common configuration, on held-out halves; 0 for that one."""


def _grouping(groups: Iterable[tuple[Condition, Flags]]) -> Grouping:
    """The groups that have requests; none if all requests are of one group."""
    some = tuple(Group(condition, is_member) for condition, is_member in groups if is_member.any())
    return some if len(some) > 1 else ()


def by_workload(tags: Sequence[str]) -> Grouping:
    """One group per tag."""
    return _grouping((Condition(workload=name), np.array(tags) == name) for name in dict.fromkeys(tags))


def by_image(has_image: Sequence[bool] | Flags) -> Grouping:
    """Requests with and without images."""
    return _grouping((Condition(has_image=value), np.array(has_image) == value) for value in (True, False))


def by_prompt_tokens(lengths: Sequence[int] | Ints) -> list[Grouping]:
    """Short and long prompts, with the boundary at each of ``LENGTH_QUANTILES``."""
    tokens = np.array(lengths)
    quantiles = {int(np.quantile(tokens, share, method="lower")) for share in thresholds.LENGTH_QUANTILES}
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
    ends = itertools.pairwise([None, *between, None]) if between else ()
    ranges = {float(value): Range(min=low, max=high) for value, (low, high) in zip(known, ends, strict=False)}
    return _grouping((Condition(temperature=limits), recorded == value) for value, limits in ranges.items())


def choose_points(ms: Floats, groupings: Sequence[Grouping], common: int, *, seed: int = 0) -> list[Proposal]:
    """The points of the grouping that saves most time; the last one decodes all remaining requests.

    A grouping by workload helps only callers who tag their requests. It is used only if it saves ``WORKLOAD_ADVANTAGE``
    times as much time as the best of the others.

    Args:
        ms: predicted decoding times [configurations, requests]. All configurations emit the same tokens. Plain decoding
            should be among them.
        groupings: of the same requests; at most one is used.
        common: row of the configuration for requests without a point of their own.
    """
    common_point = Proposal(Condition(), common, 0.0)
    best = dict.fromkeys((False, True), ([common_point], 0.0))  # points and saved ms, by whether requests need tags
    sizes = [int(group.is_member.sum()) for grouping in groupings for group in grouping]
    num_tried = max(1, sum(size >= thresholds.MIN_REQUESTS for size in sizes))
    min_deviations = NormalDist().inv_cdf(1 - thresholds.POINT_RISK / num_tried)
    for grouping in groupings:
        points, saved_ms = [], 0.0
        for group in grouping:
            members = np.flatnonzero(group.is_member)
            total_ms = float(ms[common, members].sum())
            if len(members) < thresholds.MIN_REQUESTS or total_ms == 0.0:
                continue
            gain, deviation = _gain(ms, members, common, seed)
            if gain >= thresholds.MIN_GAIN and gain > min_deviations * deviation:
                points.append(Proposal(group.condition, _fastest(ms, members), gain))
                saved_ms += gain * total_ms
        needs_tags = any(group.condition.workload is not None for group in grouping)
        if saved_ms > best[needs_tags][1]:
            best[needs_tags] = [*points, common_point], saved_ms
    (seen, seen_ms), (tagged, tagged_ms) = best[False], best[True]
    return tagged if tagged_ms > thresholds.WORKLOAD_ADVANTAGE * seen_ms else seen


def _gain(ms: Floats, members: Ints, common: int, seed: int) -> tuple[float, float]:
    """Share of the members' decoding time that their own configuration saves, and its standard deviation."""
    rng = np.random.default_rng(seed)
    gains = np.zeros(thresholds.NUM_SPLITS)
    for split in range(thresholds.NUM_SPLITS):
        order = rng.permutation(members)
        choosing, held_out = order[: len(order) // 2], order[len(order) // 2 :]
        own_ms = ms[_fastest(ms, choosing), held_out]
        gains[split] = 1 - own_ms.sum() / max(ms[common, held_out].sum(), 1e-9)
    # Nadeau and Bengio: with halves of equal size, (1 / splits + 1) times the sample variance.
    return float(gains.mean()), float(gains.std(ddof=1)) * (1 / thresholds.NUM_SPLITS + 1) ** 0.5


def _fastest(ms: Floats, requests: Ints) -> int:
    """The configuration with the least total time; the first of equally fast ones."""
    return int(ms[:, requests].sum(1).argmin())
