"""Conditions: the requests that they match, and conditions that cover others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from autotune.documents.condition import Condition, first_match

TEMPERATURES, LENGTHS, TAGS = (0.0, 0.5, 1.0), (1, 100, 101, 5000), (None, "read", "count")
Request = tuple[float, int, bool, str | None]
CONDITIONS = [
    {},
    {"temperature": {"max": 0}},
    {"temperature": {"min": 0.5}},
    {"temperature": {"min": 0.25, "max": 0.75}},
    {"prompt_tokens": {"max": 100}},
    {"prompt_tokens": {"min": 101}},
    {"prompt_tokens": {"min": 100, "max": 101}},
    {"workload": "read"},
    {"workload": "count"},
    {"workload": "read", "prompt_tokens": {"max": 100}, "temperature": {"max": 0.5}},
    {"has_image": True},
    {"has_image": False},
    {"has_image": False, "workload": "read"},
]


def matched(condition: Condition) -> set[Request]:
    """The requests of the product above that a condition matches."""
    requests = itertools.product(TEMPERATURES, LENGTHS, (False, True), TAGS)
    return {
        (temperature, prompt_tokens, has_image, tag)
        for temperature, prompt_tokens, has_image, tag in requests
        if condition.matches(temperature=temperature, prompt_tokens=prompt_tokens, has_image=has_image, workload=tag)
    }


ALL = matched(Condition())


def test_all_requirements_must_hold() -> None:
    """Ranges include both ends; a request without a tag matches no workload."""
    short_reads = {"workload": "read", "prompt_tokens": {"max": 1}, "temperature": {"min": 1}}
    cases: list[tuple[dict[str, Any], set[Request]]] = [
        ({}, ALL),
        ({"temperature": {"max": 0.5}}, {one for one in ALL if one[0] <= 0.5}),
        ({"prompt_tokens": {"min": 100, "max": 101}}, {one for one in ALL if one[1] in (100, 101)}),
        ({"has_image": False}, {one for one in ALL if not one[2]}),
        ({"workload": "read"}, {one for one in ALL if one[3] == "read"}),
        (short_reads, {one for one in ALL if (one[0], one[1], one[3]) == (1.0, 1, "read")}),
    ]
    assert len(ALL) == 3 * 4 * 2 * 3
    for fields, expected in cases:
        assert matched(Condition.model_validate(fields)) == expected


def test_covering_conditions_match_all_that_the_others_match() -> None:
    """The reverse holds too, unless the requests above do not distinguish the conditions."""
    indistinguishable = [({"temperature": {"min": 0.5}}, {"temperature": {"min": 0.25, "max": 0.75}})]
    for one, other in itertools.product(CONDITIONS, CONDITIONS):
        first, second = Condition.model_validate(one), Condition.model_validate(other)
        assert not first.covers(second) or matched(first) >= matched(second), (one, other)
        if (one, other) not in indistinguishable:
            assert first.covers(second) or not matched(first) >= matched(second), (one, other)


def test_first_matching_condition_is_chosen() -> None:
    conditions = [
        Condition.model_validate(fields) for fields in ({"workload": "read"}, {"prompt_tokens": {"max": 9}}, {})
    ]
    for tokens, tag, expected in ((5, "read", 0), (5, "count", 1), (5, None, 1), (50, "count", 2), (50, "read", 0)):
        assert first_match(conditions, temperature=0.0, prompt_tokens=tokens, has_image=False, workload=tag) == expected


def test_invalid_conditions_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": {"min": 1, "max": 0.5}}, "min must be at most max, which is 0.5"),
        ({"prompt_tokens": {}}, "a range has a min, a max or both"),
        ({"temperature": {"max": -1}}, "greater than or equal to 0"),
        ({"prompt_tokens": {"max": float("inf")}}, "finite number"),
        ({"prompt_tokens": 100}, "prompt_tokens"),
        ({"workload": ""}, "at least 1 character"),
        ({"has_image": 1}, "has_image"),
        ({"batch": 1}, "batch"),
    ]
    for fields, message in cases:
        with pytest.raises(ValidationError, match=message):
            Condition.model_validate(fields)


def test_labels() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "any request"),
        ({"temperature": {"max": 0}, "workload": "read"}, "temperature up to 0, workload read"),
        ({"prompt_tokens": {"min": 100, "max": 200}}, "prompt tokens from 100 up to 200"),
        ({"temperature": {"min": 0.5, "max": 0.5}}, "temperature 0.5"),
        ({"prompt_tokens": {"min": 300}, "has_image": True}, "prompt tokens from 300, with image"),
        ({"has_image": False, "workload": "read"}, "without image, workload read"),
    ]
    for fields, label in cases:
        assert Condition.model_validate(fields).label == label
