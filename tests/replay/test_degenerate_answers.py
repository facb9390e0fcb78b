"""When answers are said to be degenerate."""

from __future__ import annotations

import random
import re

import pytest

from autotune.replay.degenerate_answers import degenerate_answers, is_loop

VARIED = random.Random(1).choices(range(300), k=100)
LOOP = [7, 8, 9, 10, 11] * 20
BUNDLED = [
    number if place % 2 else 13 for place, number in enumerate(VARIED)
]  # "3, 1, 4": every other token is a comma


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (VARIED, False),
        (BUNDLED, False),
        (LOOP, True),
        ([0] * 100, True),
        ([VARIED[n] if n % 3 == 0 else 5 for n in range(99)], True),
        (VARIED[:20] + LOOP[:80], True),
        (VARIED[:60] + LOOP[:40], False),
        (list(range(20)) * 5, False),
        ([1] * 15, False),
        ([], False),
    ],
)
def test_a_loop(answer: list[int], expected: bool) -> None:
    assert is_loop(answer) is expected


@pytest.mark.parametrize(
    ("answers", "limit", "said"),
    [
        ([VARIED] * 20, 120, None),
        ([VARIED] * 20, 100, None),
        ([VARIED] * 19 + [LOOP], 120, None),
        ([VARIED] * 15 + [LOOP] * 5, 120, "5 of 20 answers repeat one token or a short loop; drafts look faster"),
        ([VARIED] * 8 + [LOOP, [2]], 120, "1 of 10 answers repeat .* loop, and 1 of 10 answers are empty; drafts"),
        ([VARIED[:1]] * 4, 1, None),
        (
            [VARIED[:12]] * 4,
            12,
            "all 4 answers are cut after 12 tokens or fewer; .* a larger --budget or --max-new-tokens",
        ),
        ([VARIED[:12]] * 3 + [VARIED[:11]], 12, None),
        ([], 12, None),
    ],
)
def test_what_is_said(answers: list[list[int]], limit: int, said: str | None) -> None:

    found = degenerate_answers(answers, [limit] * len(answers))
    assert found is None if said is None else found is not None and re.match(said, found) and "\n" not in found
