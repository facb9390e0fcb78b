"""Arms leave a race once they are significantly slower, or fail; a race that was interrupted goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.documents.decoding_profile import AR
from autotune.evaluation.race import Everyone, Fastest, Race, TimeLimit, race
from autotune.evaluation.runner import MAX_REPEATS, ArmRunner
from autotune.workloads.prompt import WorkloadPrompt
from benchmarks.false_verdicts import RULES, false_verdicts, recommended_by_intervals
from tests.evaluation.fake_arm import FakeArm, FakeClock, prompts_by_hand

BLOCK, PASSES = 8, 4
Time = float | Callable[[WorkloadPrompt], float]


def noisy(ms: float, noise: float, seed: int) -> Callable[[WorkloadPrompt], float]:
    """Some prompts take longer, in every arm."""
    rng = np.random.default_rng(seed)
    return lambda prompt: ms * (1 + int(prompt.name)) * float(rng.normal(1, noise))


def fastest(
    ms: dict[str, float], defaults: str = "", *, noise: float = 0.03, seed: int = 0, num_prompts: int = 16, **rule: Any
) -> tuple[Race, list[FakeArm]]:
    """A race of arms with these times per token beside plain decoding, whose time is 100."""
    times = {AR: 100.0, **ms}
    arms = [FakeArm(name, noisy(of_arm, noise, seed + n)) for n, (name, of_arm) in enumerate(times.items())]
    known = {"risk": 0.05, "prompts_per_block": BLOCK, "passes": PASSES, "always": [AR], **rule}
    return race(ArmRunner(), arms, prompts_by_hand(num_prompts), Fastest(defaults=defaults.split(), **known)), arms


@pytest.mark.parametrize(
    ("ms", "defaults", "remaining", "num_runs"),
    [
        ({"slow": 70.0, "best": 50.0}, "", ["best"], {"slow": 8, "best": 8}),
        ({"slow": 70.0, "best": 50.0, "equal": 50.0}, "", ["best", "equal"], {"slow": 8, "best": 64, AR: 64}),
        ({"a": 40.0, "equal": 40.0, "chain": 60.0, "sage": 75.0}, "chain sage", ["a", "equal", "chain"], {"sage": 8}),
        ({"a": 60.0, "chain": 40.0}, "chain", ["chain"], {AR: 8}),
        ({"a": 40.0, "chain": 60.0, "sage": 60.0}, "chain sage", ["a", "chain", "sage"], {AR: 8}),
    ],
    ids=[
        "one is left",
        "equal arms run to the end",
        "defaults leave only when a default is faster",
        "arms leave when a default is faster",
        "undecided defaults do not hold up a decided winner",
    ],
)
def test_slower_arms_leave(ms: dict[str, float], defaults: str, remaining: list[str], num_runs: dict[str, int]) -> None:
    done, _ = fastest(ms, defaults)
    assert sorted(done.remaining) == sorted(remaining) and done.remaining[0] in (remaining[0], "equal")
    assert {name: len(done.runs[name]) for name in num_runs} == num_runs


def test_a_race_may_go_on_or_end_otherwise() -> None:
    done, arms = fastest({"one": 40.0, "other": 60.0}, ends=lambda _: False)
    assert done.remaining == ["one"] and len(done.runs["one"]) == 16 * PASSES and len(done.runs["other"]) == 8
    assert arms[0].decoded == [f"{n}" for n in range(16)] * PASSES, "all in the same order"
    assert [len(rest) for rest in arms[0].prepared] == [*range(64, 0, -8)], "before every block"


def test_equal_arms_rarely_leave() -> None:
    """In 40 races of each rule, by seed, at most two lose an arm; engines' earlier rule names a winner more often."""
    num_lost = {rule: round(40 * false_verdicts(rule, "prompts 15 %", num_races=40, seed=1)) for rule in RULES}
    assert max(num_lost.values()) <= 2, num_lost
    assert recommended_by_intervals("prompts 15 %", num_races=200, seed=1) > 0.05


@pytest.mark.parametrize("seconds", [15.0, 100.0])
def test_arms_that_run_briefly_leave_where_the_time_is_short(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first block of 16 s, two arms on eight more prompts take 16 s."""
    clock = FakeClock(monkeypatch)
    arms = [FakeArm(name, 1e3, clock=clock) for name in (AR, "hf")]
    rule = Fastest(risk=0.05, prompts_per_block=8, always=[AR], briefly=["hf"], ends=lambda _: False)
    done = race(ArmRunner(), arms, prompts_by_hand(16), rule, time_limit=TimeLimit(16.0 + seconds))
    assert len(done.runs[AR]) == 16 and len(done.runs["hf"]) == (16 if seconds > 16.0 else 8)


@pytest.mark.parametrize(("seconds", "num_default"), [(37.0, 4), (41.0, 8), (45.0, 12), (100.0, 16)])
def test_defaults_leave_before_kept_prompts_need_the_time(
    seconds: float, num_default: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every arm takes a second for a prompt. After the first block of 12 s, plain decoding and the tuned arm need 24 s
    more.
    """
    clock = FakeClock(monkeypatch)
    arms = [FakeArm(name, 1e3, clock=clock) for name in (AR, "tuned", "chain")]
    rule = {"always": [AR, "tuned"], "defaults": ["chain"], "kept_prompts": 16, "ends": lambda _: False}
    fast = Fastest(risk=0.05, prompts_per_block=4, **rule)
    done = race(ArmRunner(), arms, prompts_by_hand(16), fast, time_limit=TimeLimit(seconds))
    assert len(done.runs[AR]) == len(done.runs["tuned"]) == 16 and clock.now <= seconds
    assert len(done.runs["chain"]) == num_default and done.remaining == ["chain"]


@pytest.mark.parametrize(
    ("limit", "count"),
    [
        (TimeLimit(14.9), 2),
        (TimeLimit(0.0), 0),
        (TimeLimit(0.0, min_prompts=3, last=0.0), 2),
        (TimeLimit(0.0, min_prompts=3), 3),
        (TimeLimit(), 5),
    ],
    ids=["a third would end at 15 s", "none", "the least ends in time too, but for two", "the least", "no limit"],
)
def test_a_prompt_that_would_end_too_late_is_not_begun(
    limit: TimeLimit, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, reported, runner = FakeClock(monkeypatch), list[tuple[int, int]](), ArmRunner()
    arms = [FakeArm(AR, 2e3, clock=clock), FakeArm("chain", 3e3, clock=clock)]
    clock.now = 1e-9
    done = race(
        runner, arms, prompts_by_hand(5), Everyone(), time_limit=limit, report=lambda *one: reported.append(one)
    )
    assert [len(runs) for runs in done.runs.values()] == [count, count] and round(clock.now) == 5 * count
    assert reported == [(number, 5) for number in range(count + 1)]
    if count:
        assert runner.prompt_s(arms) == pytest.approx(5.0)
        assert runner.prompt_s([*arms, FakeArm("sage")]) == pytest.approx(7.5), "unknown ones take as long as others"


def test_arms_take_turns_in_a_random_order_that_the_seed_repeats() -> None:
    """Prompt by prompt, every arm once: a machine that slows down slows all of them."""
    turns: list[list[str]] = []
    for seed in (0, 0, 1):
        turns.append([])
        arms = [FakeArm(name, lambda _, name=name: turns[-1].append(name) or 1.0) for name in "abcdef"]  # type: ignore[misc]
        race(ArmRunner(), [*arms, arms[0]], prompts_by_hand(12), Everyone(), seed=seed)
        assert all(arm.decoded == [f"{n}" for n in range(12)] for arm in arms), "an arm that is named twice runs once"
    assert turns[0] == turns[1] != turns[2]
    per_prompt = ["".join(turns[0][begin : begin + 6]) for begin in range(0, len(turns[0]), 6)]
    assert {"".join(sorted(turn)) for turn in per_prompt} == {"abcdef"} and len({*per_prompt}) > 4


# -------- resumption


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "runs.jsonl"


def everyone(ledger: Path, *arms: FakeArm, count: int = 3, context: object = None) -> Race:
    return race(ArmRunner(ledger, context=context), arms, prompts_by_hand(count), Everyone())


def test_known_runs_are_not_repeated(ledger: Path) -> None:
    """Known runs are of the same arms, by their keys, in the same context."""
    first = everyone(ledger, FakeArm(AR), FakeArm("chain"))
    assert len(ledger.read_text().splitlines()) == 6
    again = [FakeArm("other name", key="chain"), FakeArm(AR)]
    found = everyone(ledger, *again)
    assert found.runs[AR] == first.runs[AR] and found.runs["other name"] == first.runs["chain"]
    assert not again[0].decoded and not again[0].prepared
    for others, context in (([FakeArm(AR), FakeArm("sage")], None), ([FakeArm(AR), FakeArm("chain")], "elsewhere")):
        everyone(ledger, *others, context=context)
        assert all(arm.decoded == ["0", "1", "2"] for arm in others), "an hour-old time is no baseline"


def test_every_pass_is_measured(ledger: Path) -> None:
    def passes(arm: FakeArm) -> Race:
        return race(ArmRunner(ledger), [arm], prompts_by_hand(2), Fastest(0.05, 2, passes=3, ends=lambda _: False))

    first, unused = passes(FakeArm(AR, noisy(1.0, 0.1, 0))), FakeArm(AR)
    assert len({run.decode_ms for run in first.runs[AR]}) == 6
    assert passes(unused).runs == first.runs and not unused.decoded


@pytest.mark.parametrize("keeps_state", [False, True])
def test_all_arms_of_an_interrupted_prompt_are_measured_again(ledger: Path, keeps_state: bool) -> None:
    """An arm that keeps state decodes the prompts before it again, untimed."""
    everyone(ledger, FakeArm(AR), FakeArm("chain"))
    lines = ledger.read_text().splitlines()
    ledger.write_text("".join(f"{line}\n" for line in lines[:3]))  # a whole prompt and one arm of the next
    plain, chain = FakeArm(AR, 1.0), FakeArm("chain", 1.0, keeps_state=keeps_state)
    done = everyone(ledger, plain, chain)
    assert plain.decoded == ["1", "2"] and chain.decoded == (["0", "1", "2"] if keeps_state else ["1", "2"])
    assert [run.decode_ms for run in done.runs["chain"]] == [20.0, 1.0, 1.0] and chain.prepared == [["1", "2"]]


def test_a_torn_ledger_loses_the_torn_line(ledger: Path) -> None:
    """A crash in the middle of a line, a line of another version, and one that is no JSON."""
    first = everyone(ledger, FakeArm(AR))
    lines = ledger.read_text().splitlines()
    other_version = json.dumps({**json.loads(lines[1]), "temperature_of_the_room": 21})
    ledger.write_text("\n".join([lines[0], other_version, "not JSON", lines[2][: len(lines[2]) // 2]]))
    arm, unused = FakeArm(AR, 1.0), FakeArm(AR)
    again = everyone(ledger, arm)
    assert arm.decoded == ["1", "2"] and again.runs[AR][0] == first.runs[AR][0]
    assert everyone(ledger, unused).runs == again.runs
    assert not unused.decoded, "the new lines were not appended to the torn one"


# -------- arms that fail, and runs that something else slowed down


@pytest.mark.parametrize("fails", ["0", "2"])
def test_a_race_goes_on_without_an_arm_that_fails(ledger: Path, fails: str) -> None:
    """The runs that it has decoded stay."""
    done = everyone(ledger, FakeArm(AR), FakeArm("engine", fails=fails), count=4)
    assert done.failed == {"engine": "engine: the server has ended"} and done.remaining == [AR]
    assert {name: len(runs) for name, runs in done.runs.items()} == {AR: 4, "engine": int(fails)}


def test_a_race_goes_on_without_an_arm_that_cannot_get_its_state_back(ledger: Path) -> None:
    everyone(ledger, FakeArm(AR), FakeArm("engine"), count=1)
    done = everyone(ledger, FakeArm(AR), FakeArm("engine", keeps_state=True, fails="0"), count=3)
    assert done.failed.keys() == {"engine"} and [len(runs) for runs in done.runs.values()] == [3, 1]


def once(**values: float) -> Callable[[WorkloadPrompt], dict[str, Any]]:
    """Fields of the first run of prompt 1."""
    left = [values]
    return lambda prompt: left.pop() if prompt.name == "1" and left else {}


@pytest.mark.parametrize(
    ("values", "keeps_state", "num_repeated"),
    [
        (once(target_prefill_ms=1000.0), False, 1),
        (once(verify_ms=1000.0), False, 1),
        (once(captures=2), False, 1),
        (once(captures=2), True, 0),
        (lambda _: {"captures": 1}, False, 3 * MAX_REPEATS),
        (lambda _: {"verify_ms": 100.0, "decode_ms": 1e6}, False, 0),
        (lambda _: {"verify_ms": 0.0, "target_prefill_ms": 0.0}, False, 0),
    ],
    ids=["prefill", "forwards", "captured", "keeps state", "always captures", "a large tree", "measures neither"],
)
def test_a_disturbed_run_is_measured_again(
    values: Callable[[WorkloadPrompt], dict[str, Any]], keeps_state: bool, num_repeated: int
) -> None:
    """Its prefill or its forwards took much longer than those of the other arms, or something was captured. An arm that
    keeps state would answer otherwise.
    """
    runner = ArmRunner()
    usual: Any = {"values": lambda _: {"target_prefill_ms": 10.0}}
    arms = [FakeArm(AR, **usual), FakeArm("sage", **usual), FakeArm("chain", values=values, keeps_state=keeps_state)]
    done = race(runner, arms, prompts_by_hand(3), Everyone())
    assert runner.num_repeated == num_repeated and len(arms[2].decoded) == 3 + num_repeated
    assert len(done.runs["chain"]) == 3 and math.isfinite(done.runs["chain"][1].decode_ms)
