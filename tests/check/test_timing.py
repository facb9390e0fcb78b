"""The timed gate with fake workers: its verdicts, and its budget."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from autotune.check.pairs import PairRunner
from autotune.check.result import Gate
from autotune.check.sequential import Design
from autotune.check.timing import Outcome, run_pairs, time_gate, timing_of
from autotune.errors import UserError
from tests.check.fake_workers import BASE, HEAD, World, requests

DESIGN = Design()
UNLIMITED = 1e9


def noisy(slowdown: float, jitter: float, *, seed: int = 0) -> World:
    """A head that is slower by ``slowdown``, with log-normal noise of deviation ``jitter``."""
    draws = random.Random(seed)
    return World(ms=lambda side, prompt: 100.0 * (1 + slowdown * (side == "head")) * draws.lognormvariate(0.0, jitter))


def timed(world: World, folder: Path, budget_s: float = UNLIMITED, **options: Any) -> tuple[PairRunner, Outcome]:
    ledger = folder / "pairs.jsonl"
    with PairRunner(BASE, HEAD, world.launch, requests(), seed=0, ledger=ledger, clock=world.clock) as runner:
        return runner, run_pairs(runner, DESIGN, budget_s=budget_s, **options)


def judged(world: World, folder: Path, budget_s: float = UNLIMITED) -> Gate:
    runner, outcome = timed(world, folder, budget_s)
    return time_gate(timing_of(runner, outcome, DESIGN), outcome, "digits")


def test_a_slowdown_fails(tmp_path: Path) -> None:
    gate = judged(noisy(0.08, 0.02), tmp_path)
    assert gate.verdict == "failed"
    assert gate.summary.startswith("head +8.") and "after 55 pairs: slower by more than 1 % (p = " in gate.summary
    assert gate.details[0].startswith("plain decoding, as a control: +0.0 %; speedup of head: 1.8")


def test_no_change_passes(tmp_path: Path) -> None:
    gate = judged(noisy(0.0, 0.01), tmp_path)
    assert gate.verdict == "passed" and "after 55 pairs: not slower by 5 %" in gate.summary


def test_too_much_noise_stays_open(tmp_path: Path) -> None:
    gate = judged(noisy(0.03, 0.3), tmp_path)
    assert gate.verdict == "inconclusive" and "after 240 pairs: undecided at the last analysis" in gate.summary


def test_the_budget_ends_it_at_an_analysis(tmp_path: Path) -> None:
    """55 pairs take 11 launches of about 11 s and less than 0.5 s each; 80 pairs would not fit 180 s."""
    world = noisy(0.03, 0.1)
    gate = judged(world, tmp_path, budget_s=180.0)
    assert (
        gate.verdict == "inconclusive" and "after 55 pairs: the budget ended before the next analysis" in gate.summary
    )
    assert 120 < world.now_s < 180


def test_a_larger_budget_continues_with_the_pairs_so_far(tmp_path: Path) -> None:
    judged(noisy(0.03, 0.1), tmp_path, budget_s=180.0)
    world = noisy(0.08, 0.02, seed=1)
    runner, outcome = timed(world, tmp_path)
    assert outcome.analysis.num_pairs == 80 and len(runner.pairs) == 80
    assert sum(entry == ("launch", "head") for entry in world.log) == 5


def test_a_budget_too_small_for_the_first_analysis_is_refused_with_an_estimate(tmp_path: Path) -> None:
    world = noisy(0.0, 0.01)
    with pytest.raises(
        UserError, match=r"--budget 30s: the first analysis, at 55 pairs, takes about 1\d\d s here; give --budget 3m"
    ):
        judged(world, tmp_path, budget_s=30.0)
    assert world.now_s < 30.0, "estimated from five pairs"
    runner, _ = timed(noisy(0.0, 0.01), tmp_path)
    assert runner.pairs[0].base_ms != 10.0 and len(runner.pair_s) == 50, "they are kept"
