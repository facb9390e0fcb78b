"""Which kinds of requests get a point of their own: those that gain by it on requests that did not choose, and none by luck."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autotune.documents.condition import Condition, first_match
from autotune.search.point_selection import Point, by_prompt_tokens, by_temperature, by_workload, choose_points

NUM_CONFIGURATIONS = 40


def times(best: list[int], *, advantage: float = 0.8, noise: float = 0.03, seed: int = 0) -> NDArray[np.float64]:
    """[configurations, requests]: requests of different lengths, each decoded in ``advantage`` of the time by its best
    configuration.
    """
    rng = np.random.default_rng(seed)
    ms = rng.uniform(50, 150, len(best)) * rng.normal(1, noise, (NUM_CONFIGURATIONS, len(best)))
    ms[best, np.arange(len(best))] *= advantage
    return ms


def chosen(ms: NDArray[np.float64], groupings: list[Any], common: int | None = None, **options: Any) -> list[Point]:
    """With the best single configuration in common, if no other is named."""
    return choose_points(ms, groupings, int(ms.sum(1).argmin()) if common is None else common, **options)


def conditions(points: Any) -> list[tuple[dict[str, Any], int]]:
    return [(point.condition.model_dump(exclude_none=True), point.configuration) for point in points]


def test_one_configuration_for_all_is_one_point() -> None:
    tags = ["read", "count"] * 16
    groupings = [by_workload(tags), *by_prompt_tokens(range(32))]
    assert conditions(chosen(times([7] * 32), groupings)) == [({}, 7)]


def test_a_task_with_a_best_of_its_own_gets_a_point() -> None:
    """The larger group's best is everybody else's as well: unknown tags are decoded by it."""
    tags = ["read"] * 20 + ["count"] * 10
    points = chosen(times([7] * 20 + [3] * 10), [by_workload(tags)])
    assert conditions(points) == [({"workload": "count"}, 3), ({}, 7)]
    assert points[0].gain == pytest.approx(0.2, abs=0.05) and points[1].gain == 0.0


def test_every_group_may_leave_the_common_one() -> None:
    """A compromise decodes all: nobody's best, and the best of all together. Who is left has it, new tags as well; a group
    that has it for its best needs no point.
    """
    tags = ["read"] * 20 + ["count"] * 20 + ["sum"] * 20 + ["other"] * 3
    ms = times([7] * 20 + [5] * 20 + [9] * 20 + [3] * 3, advantage=0.7)
    ms[9, :40] *= 0.8
    points = chosen(ms, [by_workload(tags)], common=9)
    assert conditions(points) == [({"workload": "read"}, 7), ({"workload": "count"}, 5), ({}, 9)]
    assert [point.gain for point in points] == pytest.approx([1 - 0.7 / 0.8] * 2 + [0.0], abs=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_luck_earns_no_point(seed: int) -> None:
    """500 configurations that differ by chance alone. Judged by the requests that chose, every task would gain."""
    rng = np.random.default_rng(seed)
    ms = rng.uniform(50, 150, 64) * rng.normal(1, 0.1, (500, 64))
    tags = [f"task {number % 8}" for number in range(64)]
    groupings = [by_workload(tags), *by_prompt_tokens(rng.integers(50, 500, 64)), by_temperature([0.0, 1.0] * 32)]
    single = ms[ms.sum(1).argmin()]
    own_ms = sum(ms[:, group.is_member].sum(1).min() for group in groupings[0])
    assert 1 - own_ms / single.sum() > 0.02, "nothing to be fooled by: the test proves nothing"
    assert conditions(chosen(ms, groupings)) == [({}, int(ms.sum(1).argmin()))]


@pytest.mark.parametrize(("options", "is_split"), [
    ({}, True),
    ({"min_gain": 0.3}, False),
    ({"min_requests": 11}, False),
    ({"min_requests": 10}, True),
])  # fmt: skip
def test_a_point_must_gain_enough_on_enough_requests(options: dict[str, Any], is_split: bool) -> None:
    tags = ["read"] * 20 + ["count"] * 10
    points = chosen(times([7] * 20 + [3] * 10), [by_workload(tags)], **options)
    assert (len(points) == 2) == is_split


def test_a_gain_that_one_request_makes_is_chance() -> None:
    """A tenth of the group's time, all of it in one of ten requests; in nine of ten it is none."""
    tags = ["read"] * 20 + ["count"] * 10
    for num_gaining, share, is_split in ((1, 0.1, False), (9, 0.9, True)):
        ms = np.full((NUM_CONFIGURATIONS, 30), 200.0)
        ms[7] = 100.0
        ms[3, :20], ms[3, 20:] = 150.0, 100.1
        ms[3, 20 : 20 + num_gaining] = 100.0 * share
        assert ms.sum(1).argmin() == 7 and 0.9 <= ms[3, 20:].sum() / ms[7, 20:].sum() < 0.92
        assert (len(chosen(ms, [by_workload(tags)])) == 2) == is_split


def test_prompts_are_split_by_length_where_it_pays_most() -> None:
    """At the quantile nearest to where the best changes; the longer ones have the common one."""
    lengths = np.arange(100, 140)
    best = [3 if length < 110 else 7 for length in lengths]
    points = chosen(times(best), by_prompt_tokens(lengths))
    assert conditions(points) == [({"prompt_tokens": {"max": 109}}, 3), ({}, 7)]


def test_only_the_long_ones_may_differ() -> None:
    lengths = np.arange(100, 140)
    ms = times([7 if length < 130 else 3 for length in lengths])
    points = chosen(ms, by_prompt_tokens(lengths))
    assert conditions(points) == [({"prompt_tokens": {"min": 130}}, 3), ({}, 7)]


def test_prompts_of_one_length_are_not_split() -> None:
    assert by_prompt_tokens([80] * 9) == []
    assert [len(grouping) for grouping in by_prompt_tokens([80] * 8 + [90])] == [2]


def test_a_temperature_belongs_to_the_nearest_that_was_recorded() -> None:
    """Each has its best; what most requests want needs no condition."""
    temperatures = [0.0, 0.6, 1.0, 1.0] * 10
    best = [{0.0: 3, 0.6: 5, 1.0: 7}[value] for value in temperatures]
    points = chosen(times(best), [by_temperature(temperatures)])
    assert conditions(points) == [
        ({"temperature": {"max": 0.3}}, 3),
        ({"temperature": {"min": 0.3, "max": 0.8}}, 5),
        ({}, 7),
    ]
    assert by_temperature([0.7] * 9) == ()


def test_of_several_groupings_the_one_that_saves_most_is_used() -> None:
    tags, lengths = ["read", "count"] * 20, np.arange(40)
    best = [{"read": 3, "count": 7}[tag] for tag in tags]
    ms = times(best)
    ms[5, :10] *= 0.75  # the ten shortest gain a little by a configuration of their own
    groupings = [*by_prompt_tokens(lengths), by_workload(tags)]
    found = conditions(chosen(ms, groupings))
    assert sorted(when.get("workload", "") for when, _ in found[:-1]) in (["count"], ["read"], ["count", "read"])
    assert conditions(chosen(ms, groupings[::-1])) == found


def test_the_same_figures_give_the_same_points() -> None:
    ms = times([number % 5 for number in range(60)], advantage=0.93)
    groupings = [by_workload([f"task {number % 5}" for number in range(60)])]
    assert chosen(ms, groupings) == chosen(ms.copy(), groupings)


@pytest.mark.parametrize("seed", range(8))
def test_points_are_in_an_order_that_a_profile_takes(seed: int) -> None:
    """Every request reaches a point, the last matches all, none hides another, and what was recorded is decoded no slower
    than by any single configuration.
    """
    rng = np.random.default_rng(seed)
    tags = [f"task {number}" for number in rng.integers(0, 4, 80)]
    lengths = rng.integers(20, 300, 80)
    temperatures = rng.choice([0.0, 0.5, 1.0], 80).tolist()
    ms = times([int(tag[-1]) for tag in tags], advantage=0.85, seed=seed)
    for groupings in ([by_workload(tags)], by_prompt_tokens(lengths), [by_temperature(temperatures)]):
        points = chosen(ms, groupings)
        whens = [point.condition for point in points]
        assert whens[-1] == Condition() and whens.count(Condition()) == 1
        assert not any(a.covers(b) for number, b in enumerate(whens) for a in whens[:number])
        decoding = [
            points[first_match(whens, temperature=t, prompt_tokens=int(n), workload=tag)].configuration
            for tag, n, t in zip(tags, lengths, temperatures, strict=True)
        ]
        assert ms[decoding, np.arange(80)].sum() <= ms.sum(1).min() * (1 + 1e-9)


def test_answers_of_one_token_take_no_time_and_earn_no_point() -> None:
    ms = np.zeros((NUM_CONFIGURATIONS, 20))
    assert conditions(chosen(ms, [by_workload(["read", "count"] * 10)])) == [({}, 0)]
