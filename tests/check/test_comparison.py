"""Base and head with processes that are not real: counts, verdicts, budget, launches, and interrupted checks."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autotune.check import comparison
from autotune.check.result import Gate, Timing
from autotune.errors import ArmFailed, NotComparable, UserError
from autotune.evaluation import race, runner
from autotune.files import read_lines
from tests.check.fake_sides import CHECKED, World
from tests.sample_documents import decoding_profile

UNLIMITED = 1e9


def noisy(slowdown: float, jitter: float, *, seed: int = 0) -> World:
    """A head that is slower by ``slowdown``, with log-normal noise of deviation ``jitter``."""
    draws = random.Random(seed)
    return World(ms=lambda side: 100.0 * (1 + slowdown * (side == "head")) * draws.lognormvariate(0.0, jitter))


@pytest.fixture
def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(comparison, "CHECKS", tmp_path)
    return monkeypatch


def timed(
    world: World, patch: pytest.MonkeyPatch, budget_s: float = UNLIMITED, **sides: Any
) -> tuple[Gate, Timing | None]:
    for module in (race, runner, comparison):
        patch.setattr(module, "time", world)
    return world.comparison(**sides).time_gate(CHECKED, budget_s=budget_s)


@pytest.mark.parametrize(
    ("fields", "base", "verdict", "summary"),
    [
        ({}, {}, "passed", "3 of 3 prompts have the same counts as the base"),
        ({"target_forwards": 9}, {}, "failed", "3 have worse counts"),
        ({"tokens_sha256": "new"}, {}, "failed", "3 have a different answer"),
        ({"target_forwards": None}, {}, "skipped", "counts are not reproducible"),
        ({}, {"profile": decoding_profile(tree={"policy": "chain", "depth": 2})}, "skipped", "other trees"),
    ],
)
def test_counts_of_the_base(fields: dict[str, Any], base: dict[str, Any], verdict: str, summary: str) -> None:
    """The base decodes twice where counts fail, because counts that are not reproducible do not gate."""
    numbers = iter(range(1000))
    world = World(fields=lambda _: {k: 1 + next(numbers) % 5 if v is None else v for k, v in fields.items()})
    gate = world.comparison(**base).counts_gate(CHECKED)
    assert gate.verdict == verdict and summary in gate.summary, gate
    num_launched = len([call for call, _ in world.log if call == "launch"])
    assert num_launched == (0 if base else 1 if verdict == "passed" else 2)


@pytest.mark.parametrize(
    ("world", "budget_s", "verdict", "text"),
    [
        (noisy(0.08, 0.02), UNLIMITED, "failed", "after 55 pairs: slower by more than 1 % (p = "),
        (noisy(0.0, 0.01), UNLIMITED, "passed", "after 55 pairs: not slower by 5 %"),
        (noisy(0.03, 0.3), UNLIMITED, "inconclusive", "after 240 pairs: undecided at the last analysis"),
        # 55 pairs take 11 launches of 10 s and a second each; 80 pairs would not fit.
        (noisy(0.03, 0.1), 150.0, "inconclusive", "after 55 pairs: the budget ended before the next analysis"),
        (noisy(0.0, 0.01), 30.0, "inconclusive", "--budget 30s: the first analysis, at 55 pairs, takes about 121 s"),
    ],
)
def test_verdicts(world: World, budget_s: float, verdict: str, text: str, patch: pytest.MonkeyPatch) -> None:
    gate, timing = timed(world, patch, budget_s)
    assert gate.verdict == verdict and text in gate.summary, gate.summary
    assert world.now_s < budget_s
    if timing is None:
        assert gate.summary.endswith("give --budget 3m (the 5 pairs so far are kept)")
    else:
        slowdown, (low, high) = timing.slowdown, timing.ci95
        assert low < slowdown < high and len(timing.base_ms) == len(timing.head_ms) in (55, 240)


def test_both_sides_are_started_again_and_warmed_up_every_five_pairs(patch: pytest.MonkeyPatch) -> None:
    """All prompts take turns, and every pair has its own random order."""
    world = noisy(0.0, 0.01)
    timed(world, patch)
    done = Counter(call for call, name in world.log if call not in ("base", "head"))
    assert done["launch"] == done["prepare"] == done["close"] == 2 * 11
    runs = [entry for entry in world.log if entry[0] in ("base", "head")]
    pairs = [runs[number : number + 2] for number in range(0, 110, 2)]
    assert all({side for side, _ in pair} == {"base", "head"} and len({p for _, p in pair}) == 1 for pair in pairs)
    assert 18 <= sum(pair[0][0] == "head" for pair in pairs) <= 37
    prompts = [pair[0][1] for pair in pairs]
    turns = [tuple(prompts[begin : begin + 3]) for begin in range(0, 54, 3)]
    assert all(len({*turn}) == 3 for turn in turns) and len({*turns}) > 1
    starts = [name for call, name in world.log if call == "launch"]
    assert starts[:4] == ["base", "head", "head", "base"], "in turns"
    for seed, is_same in ((0, True), (1, False)):
        again = noisy(0.0, 0.01)
        timed(again, patch, seed=seed)
        assert (again.log == world.log) is is_same


def test_an_interrupted_check_goes_on_and_no_pair_is_left_out(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    """Interrupted in the seventh pair, it goes on with that one, in new processes. One of 110 runs takes a minute."""
    times = iter([*[100.0] * 12, -1.0])

    def interrupt(side: str) -> float:
        if (ms := next(times)) < 0:
            raise KeyboardInterrupt
        return ms

    with pytest.raises(KeyboardInterrupt):
        timed(World(ms=interrupt), patch)
    (ledger,) = tmp_path.glob("*.jsonl")
    assert len(read_lines(ledger)) == 12
    with ledger.open("a") as file:
        file.write('{"comparison": "torn')
    later = iter([6e4, *[100.0] * 97])
    world = World(ms=lambda side: next(later))
    _, timing = timed(world, patch)
    assert timing is not None and next(later, None) is None, "110 runs, and none again"
    assert sorted([*timing.base_ms, *timing.head_ms])[-2:] == [100.0, 6e4]
    assert [name for call, name in world.log if call == "launch"].count("base") == 10
    assert not [*tmp_path.glob("*.jsonl")], "the next check measures again"


def test_a_larger_budget_goes_on_with_the_pairs_so_far(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    timed(noisy(0.03, 0.1), patch, 150.0)
    (ledger,) = tmp_path.glob("*.jsonl")
    assert len(read_lines(ledger)) == 110
    world = noisy(0.08, 0.02, seed=1)
    _, timing = timed(world, patch)
    assert timing is not None and world.log.count(("launch", "head")) == (len(timing.head_ms) - 55) / 5 > 0


def test_sides_that_answer_differently_or_die_end_the_check(patch: pytest.MonkeyPatch) -> None:
    """Different answers are compared where the precision rounds."""
    world = World(fields=lambda side: {"tokens_sha256": side})
    with pytest.raises(NotComparable, match=r"prompt \d: base and head answer differently \(41 and 41 tokens\)"):
        timed(world, patch)
    assert timed(world, patch, rounding="near ties in bfloat16")[0].verdict == "passed"

    def die(side: str) -> float:
        raise ArmFailed(f"llama-server: ended with code 1 in {side}")

    message = r"^the (base|head), the \1, cannot go on: llama-server: ended with code 1 in \1$"
    with pytest.raises(UserError, match=message):
        timed(World(ms=die), patch, key="another base")
