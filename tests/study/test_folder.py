"""The operating point that decodes each tuning prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.documents.condition import Condition
from autotune.study.folder import points_of_prompts
from tests.sample_documents import decoding_profile, random_trace


def test_tuning_prompts_are_decoded_by_the_first_point_that_they_match() -> None:
    trace = random_trace(0)  # prompts of 20 to 23 tokens, every other one with an image
    trace = replace(trace, header=trace.header.model_copy(update={"tasks": ["read", "read", "count", "read"]}))
    cases: tuple[tuple[list[dict[str, Any]], list[int]], ...] = (
        ([{}], [0, 0, 0, 0]),
        ([{"has_image": True}, {}], [1, 0, 1, 0]),
        ([{"prompt_tokens": {"max": 21}}, {}], [0, 0, 1, 1]),
        ([{"temperature": {"min": 0.5}}, {"temperature": {"max": 0}}, {}], [1, 1, 1, 1]),
        ([{"has_image": True, "workload": "read"}, {"workload": "count"}, {}], [2, 0, 1, 0]),
    )
    point = decoding_profile().point
    for whens, expected in cases:
        points = [point.model_copy(update={"when": Condition.model_validate(when)}) for when in whens]
        profile = decoding_profile().model_copy(update={"points": points})
        assert points_of_prompts(profile, trace).tolist() == expected
