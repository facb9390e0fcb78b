"""Which operating point decodes which part of the tuning prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from autotune.documents.condition import Condition, first_match
from autotune.study.folder import points_of_bands
from tests.sample_documents import decoding_profile, random_trace

WHENS: tuple[list[dict[str, Any]], ...] = (
    [{}],
    [{"has_image": True}, {}],
    [{"context_tokens": {"max": 25}}, {}],
    [{"context_tokens": {"min": 22, "max": 27.5}}, {"context_tokens": {"min": 31}}, {}],
    [{"has_image": True, "context_tokens": {"min": 30}}, {"has_image": True}, {"workload": "read"}, {}],
)


def test_points_of_bands_are_those_of_every_round() -> None:
    """Results for every context at which a round of a prompt may start."""
    trace = random_trace(0)  # prompts of 20 to 23 tokens, every other one with an image, and 11 to 14 decoded tokens
    trace = replace(trace, header=trace.header.model_copy(update={"tasks": ["read", "read", "count", "read"]}))
    for whens in WHENS:
        conditions = [Condition.model_validate(when) for when in whens]
        point = decoding_profile().point
        points = [point.model_copy(update={"when": condition}) for condition in conditions]
        profile = decoding_profile().model_copy(update={"points": points})
        boundaries, table = found = points_of_bands(profile, trace)
        for p, length in enumerate(trace.prompt_length.tolist()):
            expected = np.full(len(boundaries) + 1, -1)
            for context in range(length, length + int(np.diff(trace.answer_start)[p]) - 1):
                band = int(np.searchsorted(boundaries, context, side="right"))
                number = first_match(
                    conditions,
                    temperature=0.0,
                    prompt_tokens=length,
                    has_image=bool(p % 2),
                    workload=trace.header.tasks[p],
                    context_tokens=context,
                )
                assert expected[band] in (-1, number), "one point for a band"
                expected[band] = number
            assert table[p].tolist() == expected.tolist()
        decoding = [found.has_rounds(number).any() for number in range(len(points))]
        assert all(decoding) and (len(points) == 1 or (table != table[0, 0]).any())
