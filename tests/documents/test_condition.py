"""Conditions: what they match, what they hide, and what is refused."""

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
    """Which of all requests it matches."""
    requests = itertools.product(TEMPERATURES, LENGTHS, TAGS)
    return {r for r in requests if condition.matches(temperature=r[0], prompt_tokens=r[1], workload=r[2])}


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, set(itertools.product(TEMPERATURES, LENGTHS, TAGS))),
    ({"temperature": {"max": 0.5}}, set(itertools.product((0.0, 0.5), LENGTHS, TAGS))),
    ({"prompt_tokens": {"min": 100, "max": 101}}, set(itertools.product(TEMPERATURES, (100, 101), TAGS))),
    ({"workload": "read"}, set(itertools.product(TEMPERATURES, LENGTHS, ("read",)))),
    ({"workload": "read", "prompt_tokens": {"max": 1}, "temperature": {"min": 1}}, {(1.0, 1, "read")}),
])  # fmt: skip
def test_all_that_is_given_must_hold(fields: dict[str, Any], expected: set[Any]) -> None:
    """Both ends of a range are in it; a request without a tag is of no workload."""
    assert matched(Condition.model_validate(fields)) == expected


@pytest.mark.parametrize(("one", "other"), itertools.product(CONDITIONS, CONDITIONS))
def test_one_that_covers_another_matches_all_that_it_does(one: Any, other: Any) -> None:
    """And the reverse, on requests that tell all of these apart but for what lies between them."""
    first, second = Condition.model_validate(one), Condition.model_validate(other)
    assert not first.covers(second) or matched(first) >= matched(second)
    between = ({"temperature": {"min": 0.25, "max": 0.75}}, {"temperature": {"min": 0.5}})
    if (other, one) != between:
        assert first.covers(second) or not matched(first) >= matched(second)


def test_the_first_that_matches_counts() -> None:
    conditions = [
        Condition.model_validate(fields) for fields in ({"workload": "read"}, {"prompt_tokens": {"max": 9}}, {})
    ]
    for tokens, tag, expected in ((5, "read", 0), (5, "count", 1), (5, None, 1), (50, "count", 2), (50, "read", 0)):
        assert first_match(conditions, temperature=0.0, prompt_tokens=tokens, workload=tag) == expected


@pytest.mark.parametrize(("fields", "message"), [
    ({"temperature": {"min": 1, "max": 0.5}}, "min must be at most max, which is 0.5"),
    ({"prompt_tokens": {}}, "a range has a min, a max or both"),
    ({"temperature": {"max": -1}}, "greater than or equal to 0"),
    ({"prompt_tokens": {"max": float("inf")}}, "finite number"),
    ({"prompt_tokens": 100}, "prompt_tokens"),
    ({"workload": ""}, "at least 1 character"),
    ({"batch": 1}, "batch"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Condition.model_validate(fields)


@pytest.mark.parametrize(("fields", "label"), [
    ({}, "any request"),
    ({"temperature": {"max": 0}, "workload": "read"}, "temperature up to 0, workload read"),
    ({"prompt_tokens": {"min": 100, "max": 200}}, "prompt tokens from 100 up to 200"),
    ({"temperature": {"min": 0.5, "max": 0.5}}, "temperature 0.5"),
])  # fmt: skip
def test_a_label_is_for_people(fields: dict[str, Any], label: str) -> None:
    assert Condition.model_validate(fields).label == label
