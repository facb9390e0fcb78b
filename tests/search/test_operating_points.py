"""Groups of requests get an operating point only if they gain on held-out requests, significantly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autotune.documents.condition import Condition, first_match
from autotune.search import thresholds
from autotune.search.operating_points import (
    Proposal,
    by_image,
    by_prompt_tokens,
    by_temperature,
    by_workload,
    choose_points,
)

NUM_CONFIGURATIONS = 40


def times(best: list[int], *, advantage: float = 0.8, noise: float = 0.03, seed: int = 0) -> NDArray[np.float64]:
    """[configurations, requests]: requests of different lengths, each decoded in ``advantage`` of the time by its best
    configuration.
    """
    rng = np.random.default_rng(seed)
    ms = rng.uniform(50, 150, len(best)) * rng.normal(1, noise, (NUM_CONFIGURATIONS, len(best)))
    ms[best, np.arange(len(best))] *= advantage
    return ms


def chosen(ms: NDArray[np.float64], groupings: list[Any], common: int | None = None) -> list[Proposal]:
    """Points with the best single configuration as the common one, unless ``common`` is given."""
    return choose_points(ms, groupings, int(ms.sum(1).argmin()) if common is None else common)


def conditions(points: Any) -> list[tuple[dict[str, Any], int]]:
    return [(point.condition.model_dump(exclude_none=True), point.configuration) for point in points]


def test_one_best_configuration_is_one_point() -> None:
    tags = ["read", "count"] * 16
    groupings = [by_workload(tags), *by_prompt_tokens(range(32))]
    assert conditions(chosen(times([7] * 32), groupings)) == [({}, 7)]


def test_task_with_its_own_best_configuration_gets_a_point() -> None:
    """The best configuration of the larger group also decodes requests with unknown tags."""
    tags = ["read"] * 20 + ["count"] * 10
    points = chosen(times([7] * 20 + [3] * 10), [by_workload(tags)])
    assert conditions(points) == [({"workload": "count"}, 3), ({}, 7)]
    assert points[0].gain == pytest.approx(0.2, abs=0.05) and points[1].gain == 0.0


def test_several_groups_may_get_points() -> None:
    """The common configuration is the best over all requests together. Groups that it suits best, and small groups, get
    no point.
    """
    tags = ["read"] * 20 + ["count"] * 20 + ["sum"] * 20 + ["other"] * 3
    ms = times([7] * 20 + [5] * 20 + [9] * 20 + [3] * 3, advantage=0.7)
    ms[9, :40] *= 0.8
    points = chosen(ms, [by_workload(tags)], common=9)
    assert conditions(points) == [({"workload": "read"}, 7), ({"workload": "count"}, 5), ({}, 9)]
    assert [point.gain for point in points] == pytest.approx([1 - 0.7 / 0.8] * 2 + [0.0], abs=0.05)


def test_random_differences_give_no_point() -> None:
    """500 configurations differ by chance alone. On the requests that choose, every task would gain."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        ms = rng.uniform(50, 150, 64) * rng.normal(1, 0.1, (500, 64))
        tags = [f"task {number % 8}" for number in range(64)]
        groupings = [
            by_workload(tags),
            *by_prompt_tokens(rng.integers(50, 500, 64)),
            by_temperature([0.0, 1.0] * 32),
            by_image([number % 3 == 0 for number in range(64)]),
        ]
        single = ms[ms.sum(1).argmin()]
        own_ms = sum(ms[:, group.is_member].sum(1).min() for group in groupings[0])
        assert 1 - own_ms / single.sum() > 0.02, "without apparent gains the test proves nothing"
        assert conditions(chosen(ms, groupings)) == [({}, int(ms.sum(1).argmin()))]


@pytest.mark.parametrize(
    ("threshold", "value", "is_split"),
    [("MIN_GAIN", 0.02, True), ("MIN_GAIN", 0.3, False), ("MIN_REQUESTS", 11, False), ("MIN_REQUESTS", 10, True)],
)
def test_point_needs_a_minimum_gain_and_size(
    threshold: str, value: float, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, threshold, value)
    points = chosen(times([7] * 20 + [3] * 10), [by_workload(["read"] * 20 + ["count"] * 10)])
    assert (len(points) == 2) == is_split


def test_gain_of_a_single_request_is_not_significant() -> None:
    """One of ten requests saves a tenth of the group's time; then nine of ten requests save as much."""
    tags = ["read"] * 20 + ["count"] * 10
    for num_gaining, share, is_split in ((1, 0.1, False), (9, 0.9, True)):
        ms = np.full((NUM_CONFIGURATIONS, 30), 200.0)
        ms[7] = 100.0
        ms[3, :20], ms[3, 20:] = 150.0, 100.1
        ms[3, 20 : 20 + num_gaining] = 100.0 * share
        assert ms.sum(1).argmin() == 7 and 0.9 <= ms[3, 20:].sum() / ms[7, 20:].sum() < 0.92
        assert (len(chosen(ms, [by_workload(tags)])) == 2) == is_split


@pytest.mark.parametrize(("own", "limits"), [(range(100, 110), {"max": 109}), (range(130, 140), {"min": 130})])
def test_length_boundary_is_the_one_that_saves_most(own: range, limits: dict[str, int]) -> None:
    """It is the quantile nearest to the change of the best configuration; the other prompts use the common one."""
    lengths = np.arange(100, 140)
    points = chosen(times([3 if length in own else 7 for length in lengths]), by_prompt_tokens(lengths))
    assert conditions(points) == [({"prompt_tokens": limits}, 3), ({}, 7)]


def test_prompts_of_one_length_are_not_split() -> None:
    assert by_prompt_tokens([80] * 9) == []
    assert [len(grouping) for grouping in by_prompt_tokens([80] * 8 + [90])] == [2]


def test_temperatures_belong_to_the_nearest_recorded_one() -> None:
    """Each recorded temperature has its own best configuration; the most frequent one needs no condition."""
    temperatures = [0.0, 0.6, 1.0, 1.0] * 10
    best = [{0.0: 3, 0.6: 5, 1.0: 7}[value] for value in temperatures]
    points = chosen(times(best), [by_temperature(temperatures)])
    assert conditions(points) == [
        ({"temperature": {"max": 0.3}}, 3),
        ({"temperature": {"min": 0.3, "max": 0.8}}, 5),
        ({}, 7),
    ]
    assert by_temperature([0.7] * 9) == ()


def test_requests_with_images_may_get_a_point() -> None:
    has_image = [True] * 20 + [False] * 12
    ms = times([7] * 20 + [3] * 12)
    assert conditions(chosen(ms, [by_image(has_image)])) == [({"has_image": False}, 3), ({}, 7)]


def test_groupings_of_equal_requests_are_left_out() -> None:
    assert by_image([True] * 9) == by_image([False] * 9) == by_workload(["read"] * 9) == ()


@pytest.mark.parametrize(("share", "is_tagged"), [(1.0, False), (0.8, False), (0.5, True)])
def test_a_grouping_by_workload_must_save_clearly_more_than_one_that_the_runtime_sees(
    share: float, is_tagged: bool
) -> None:
    """``share`` of the requests of the task that gains have images, and no others."""
    assert 0.5 < 1 / thresholds.WORKLOAD_ADVANTAGE < 0.8
    tags = ["read"] * 20 + ["count"] * 20
    has_image = [20 <= number < 20 + 20 * share for number in range(40)]
    ms = times([7] * 20 + [3] * 20, noise=0.0)
    found = conditions(chosen(ms, [by_workload(tags), by_image(has_image)], common=7))
    assert found == [({"workload": "count"} if is_tagged else {"has_image": True}, 3), ({}, 7)]


def test_grouping_that_saves_most_is_used() -> None:
    tags, lengths = ["read", "count"] * 20, np.arange(40)
    best = [{"read": 3, "count": 7}[tag] for tag in tags]
    ms = times(best)
    ms[5, :10] *= 0.75  # the ten shortest gain a little by a configuration of their own
    groupings = [*by_prompt_tokens(lengths), by_workload(tags)]
    found = conditions(chosen(ms, groupings))
    assert sorted(when.get("workload", "") for when, _ in found[:-1]) in (["count"], ["read"], ["count", "read"])
    assert conditions(chosen(ms, groupings[::-1])) == found


def test_selection_is_deterministic() -> None:
    ms = times([number % 5 for number in range(60)], advantage=0.93)
    groupings = [by_workload([f"task {number % 5}" for number in range(60)])]
    assert chosen(ms, groupings) == chosen(ms.copy(), groupings)


def test_points_form_a_valid_profile() -> None:
    """The last point matches every request, no point hides another, and the recorded requests are decoded no slower
    than by any single configuration.
    """
    for seed in range(8):
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
                points[
                    first_match(whens, temperature=t, prompt_tokens=int(n), has_image=False, workload=tag)
                ].configuration
                for tag, n, t in zip(tags, lengths, temperatures, strict=True)
            ]
            assert ms[decoding, np.arange(80)].sum() <= ms.sum(1).min() * (1 + 1e-9)


def test_answers_of_one_token_give_no_point() -> None:
    ms = np.zeros((NUM_CONFIGURATIONS, 20))
    assert conditions(chosen(ms, [by_workload(["read", "count"] * 10)])) == [({}, 0)]
