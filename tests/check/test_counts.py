"""Changes of counts, their predicted cost, and when they are a regression."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.check.counts import cost_in_steps, counts_gate
from autotune.check.result import COUNTS, Gate
from autotune.documents.decoded import Decoded
from autotune.trees.fallback import RoundPrice
from tests.check.sample_documents import prompt_evidence as counts

PRICE = RoundPrice(round_steps=1.2, level_steps=0.1, node_steps=0.02)


def judged(now: list[Decoded], then: list[Decoded], **options: Any) -> Gate:
    known: dict[str, Any] = {"source": "the profile's evidence", "tolerance": 0.01, "prices": [PRICE] * len(now)}
    return counts_gate(now, then, name=COUNTS, workload="digits", **{**known, **options})


def test_counts_are_priced_in_plain_steps() -> None:
    then = counts()
    assert cost_in_steps(then, PRICE) == pytest.approx(10 * 1.2 + 40 * 0.1 + 40 * 0.02)
    with_plain_steps = counts(plain_steps=4)
    assert cost_in_steps(with_plain_steps, PRICE) == pytest.approx(4 + 6 * 1.2 + 40 * 0.1 + 40 * 0.02)


def test_equal_counts_pass() -> None:
    gate = judged([counts("a"), counts("prompts.jsonl:2")], [counts("a"), counts("workload.jsonl:2")])
    assert (gate.verdict, gate.details) == ("passed", [])
    assert gate.summary == "2 of 2 prompts have the same counts as the profile's evidence"


def test_a_lower_accepted_length_is_a_regression_without_timing() -> None:
    """One more round in ten costs 1.7 of 16.8 steps."""
    worse = counts("a", target_forwards=11, draft_forwards=44, verified_nodes=44, accepted_lengths=[29])
    gate = judged([worse, counts("b")], [counts("a"), counts("b")])
    assert gate.verdict == "failed" and "predicted +5.0 % time" in gate.summary
    assert gate.details == [
        "a: target forwards 10 -> 11, draft forwards 40 -> 44, verified nodes 40 -> 44, accepted tokens 30 -> 29; predicted +10.0 % time"
    ]


def test_a_small_loss_is_a_warning() -> None:
    """0.1 of 168 steps."""
    now = [counts("a", draft_forwards=41)] + [counts(str(n)) for n in range(9)]
    gate = judged(now, [counts("a")] + [counts(str(n)) for n in range(9)])
    assert gate.verdict == "warned" and "1 have worse counts, 0 other counts: predicted +0.1 % time" in gate.summary


def test_losses_of_one_prompt_can_be_offset_by_another() -> None:
    now = [counts("a", draft_forwards=50), counts("b", draft_forwards=29)]
    gate = judged(now, [counts("a"), counts("b")])
    assert gate.verdict == "warned" and "1 have worse counts, 1 other counts: predicted -0.3 % time" in gate.summary


def test_better_counts_pass() -> None:
    better = counts("a", target_forwards=9, draft_forwards=36, verified_nodes=36, accepted_lengths=[31])
    assert judged([better], [counts("a")]).verdict == "passed"


def test_a_different_answer_fails_unless_there_is_a_reason_for_it() -> None:
    now, then = [counts("a", tokens_sha256="new", target_forwards=1), counts("b")], [counts("a"), counts("b")]
    gate = judged(now, then)
    assert gate.verdict == "failed" and gate.details == ["a: different answer"]
    excused = judged(now, then, different_answer_reason="near ties in bfloat16")
    assert excused.verdict == "warned" and "1 have a different answer (near ties in bfloat16)" in excused.summary
    assert "predicted" not in excused.summary, "counts of different answers are not compared"


def test_without_prices_only_target_forwards_are_compared() -> None:
    worse = counts("a", target_forwards=11, draft_forwards=400)
    assert "predicted +10.0 % time" in judged([worse], [counts("a")], prices=[None]).summary


def test_without_a_tolerance_any_other_count_fails() -> None:
    """As for an engine, whose rounds have no prices."""
    better = counts("a", verified_nodes=39)
    assert judged([better], [counts("a")]).verdict == "passed"
    assert judged([better], [counts("a")], tolerance=None).verdict == "failed"
