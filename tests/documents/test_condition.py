"""Conditions: the requests that they match, and conditions that cover others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from autotune.documents.condition import Condition, first_match

TEMPERATURES, LENGTHS, TAGS = (0.0, 0.5, 1.0), (1, 100, 101, 5000), (None, "read", "count")
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
]


def matched(condition: Condition) -> set[tuple[float, int, str | None]]:
    """The requests of the product above that a condition matches."""
    requests = itertools.product(TEMPERATURES, LENGTHS, TAGS)
    return {r for r in requests if condition.matches(temperature=r[0], prompt_tokens=r[1], workload=r[2])}


def test_all_requirements_must_hold() -> None:
    """Ranges include both ends; a request without a tag matches no workload."""
    short_reads = {"workload": "read", "prompt_tokens": {"max": 1}, "temperature": {"min": 1}}
    cases: list[tuple[dict[str, Any], set[Any]]] = [
        ({}, set(itertools.product(TEMPERATURES, LENGTHS, TAGS))),
        ({"temperature": {"max": 0.5}}, set(itertools.product((0.0, 0.5), LENGTHS, TAGS))),
        ({"prompt_tokens": {"min": 100, "max": 101}}, set(itertools.product(TEMPERATURES, (100, 101), TAGS))),
        ({"workload": "read"}, set(itertools.product(TEMPERATURES, LENGTHS, ("read",)))),
        (short_reads, {(1.0, 1, "read")}),
    ]
    for fields, expected in cases:
        assert matched(Condition.model_validate(fields)) == expected


def test_covering_conditions_match_all_that_the_others_match() -> None:
    """And the reverse: the requests above distinguish all of these conditions but two."""
    indistinguishable = ({"temperature": {"min": 0.5}}, {"temperature": {"min": 0.25, "max": 0.75}})
    for one, other in itertools.product(CONDITIONS, CONDITIONS):
        first, second = Condition.model_validate(one), Condition.model_validate(other)
        assert not first.covers(second) or matched(first) >= matched(second), (one, other)
        if (one, other) != indistinguishable:
            assert first.covers(second) or not matched(first) >= matched(second), (one, other)


def test_first_matching_condition_is_chosen() -> None:
    conditions = [
        Condition.model_validate(fields) for fields in ({"workload": "read"}, {"prompt_tokens": {"max": 9}}, {})
    ]
    for tokens, tag, expected in ((5, "read", 0), (5, "count", 1), (5, None, 1), (50, "count", 2), (50, "read", 0)):
        assert first_match(conditions, temperature=0.0, prompt_tokens=tokens, workload=tag) == expected


def test_invalid_conditions_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": {"min": 1, "max": 0.5}}, "min must be at most max, which is 0.5"),
        ({"prompt_tokens": {}}, "a range has a min, a max or both"),
        ({"temperature": {"max": -1}}, "greater than or equal to 0"),
        ({"prompt_tokens": {"max": float("inf")}}, "finite number"),
        ({"prompt_tokens": 100}, "prompt_tokens"),
        ({"workload": ""}, "at least 1 character"),
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
    ]
    for fields, label in cases:
        assert Condition.model_validate(fields).label == label
