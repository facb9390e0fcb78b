"""Changes of counts, their predicted cost, and when they are a regression."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.check.gates import cost_in_steps, counts_gate, if_repeatable
from autotune.check.result import COUNTS
from autotune.trees.fallback import RoundPrice
from tests.check.sample_documents import prompt_evidence as counts

PRICE = RoundPrice(round_steps=1.2, level_steps=0.1, node_steps=0.02)


def test_counts_are_priced_in_plain_steps() -> None:
    assert cost_in_steps(counts(), PRICE) == pytest.approx(10 * 1.2 + 40 * 0.1 + 40 * 0.02)
    assert cost_in_steps(counts(plain_steps=4), PRICE) == pytest.approx(4 + 6 * 1.2 + 40 * 0.1 + 40 * 0.02)


WORSE = {"target_forwards": 11, "draft_forwards": 44, "verified_nodes": 44, "accepted_lengths": [29]}
BETTER = {"target_forwards": 9, "draft_forwards": 36, "verified_nodes": 36, "accepted_lengths": [31]}
FORWARDS = "target forwards 10 -> 11, draft forwards 40 -> 44, verified nodes 40 -> 44, accepted tokens 30 -> 29"
EXACT: dict[str, Any] = {"tolerance": None}


@pytest.mark.parametrize(
    ("now", "options", "verdict", "summary", "details"),
    [
        ([{}, {}], {}, "passed", "2 of 2 prompts have the same counts as the profile's evidence", []),
        # One more round in ten costs 1.7 of 16.8 steps.
        ([WORSE, {}], {}, "failed", "predicted +5.0 % time", [f"a: {FORWARDS}; predicted +10.0 % time"]),
        # 0.1 of 168 steps.
        ([{"draft_forwards": 41}, *[{}] * 9], {}, "warned", "1 have worse counts, 0 other counts: predicted +0.1 % ", None),
        # A loss of one prompt is offset by another.
        ([{"draft_forwards": 50}, {"draft_forwards": 29}], {}, "warned", "1 have worse counts, 1 other counts: predicted -0.3", None),
        ([BETTER], {}, "passed", "0 have worse counts, 1 other counts", None),
        ([{"target_forwards": 11, "draft_forwards": 400}], {"price": None}, "failed", "predicted +10.0 % time", None),
        ([WORSE], {"advisory_reason": "made elsewhere"}, "warned", "advisory only: made elsewhere", None),
        # Without a tolerance any other count fails, as of an engine, whose rounds have no prices.
        ([{"verified_nodes": 39}], {}, "passed", "1 other counts", None),
        ([{"verified_nodes": 39}], EXACT, "failed", "1 other counts", None),
        ([{"verified_nodes": 41}, {}], {**EXACT, "tolerated_changes": 0.5}, "warned", "1 have worse counts", None),
        ([{"verified_nodes": 41}, {}], {**EXACT, "tolerated_changes": 0.4}, "failed", "1 have worse counts", None),
        # Counts of different answers are not compared.
        ([{"tokens_sha256": "new", "target_forwards": 1}], {}, "failed", "1 have a different answer", ["a: different answer"]),
        ([{"tokens_sha256": "new"}], {"rounding": "near ties"}, "warned", "different answer (near ties)", None),
    ],
)  # fmt: skip
def test_verdicts(
    now: list[dict[str, Any]], options: dict[str, Any], verdict: str, summary: str, details: list[str] | None
) -> None:
    names = "abcdefghij"[: len(now)]
    runs = [counts(name, **fields) for name, fields in zip(names, now, strict=True)]
    known: dict[str, Any] = {
        "source": "the profile's evidence",
        "tolerance": 0.01,
        "price": PRICE,
        "workload": "digits",
    }
    gate = counts_gate(runs, [counts(name) for name in names], name=COUNTS, **{**known, **options})
    assert gate.verdict == verdict and summary in gate.summary, gate
    assert details is None or gate.details == details
    for again, expected in ((runs, verdict), ([counts("a", target_forwards=7)] * len(runs), "skipped")):
        assert if_repeatable(gate, runs, lambda again=again: again).verdict == (  # type: ignore[misc]
            expected if verdict == "failed" else verdict
        )
