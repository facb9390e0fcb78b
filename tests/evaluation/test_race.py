"""Arms leave a race once they are significantly slower."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR
from autotune.evaluation import race as module
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Race
from autotune.evaluation.runner import ArmRunner
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.evaluation.stub_arm import StubArm

RISK, BLOCK, PASSES = 0.05, 8, 4


class TimedRunner(ArmRunner):
    """Arms take a given time for every prompt, with seeded noise."""

    def __init__(
        self, ms: dict[str, float], noise: float = 0.0, *, num_in_time: int | None = None, seed: int = 1
    ) -> None:
        self.plain = StubArm(AR)  # type: ignore[assignment]
        self.ms = ms
        self.noise = noise
        self.num_in_time = 1 << 30 if num_in_time is None else num_in_time
        self.random = np.random.default_rng(seed)
        self.compared: list[tuple[set[str], int]] = []

    def reserve(self, workload: Workload) -> None: ...

    def prompt_s(self, arms: Sequence[Arm]) -> float:
        return float(len(arms))

    def compare(  # type: ignore[override]
        self, arms: Sequence[Arm], workload: Workload, *, repeat: int, min_prompts: int, **_: Any
    ) -> dict[str, list[Decoded]]:
        self.compared.append(({arm.name for arm in arms}, repeat))
        count = min(len(workload.prompts), max(min_prompts, self.num_in_time))
        self.num_in_time -= count
        prompts = 1 + np.arange(count)  # some take longer, in every arm
        times = {arm.name: self.ms[arm.name] * prompts * self.random.normal(1, self.noise, count) for arm in arms}
        runs: dict[str, Any] = {
            name: [SimpleNamespace(decode_ms=x, new_tokens=11) for x in ms.tolist()] for name, ms in times.items()
        }
        return runs


def race(runner: ArmRunner, names: str, defaults: str = "", *, num_prompts: int = 16, **options: Any) -> Race:
    prompt = WorkloadPrompt("p", Prompt(prompt="p"), ())
    defaults_of_race: dict[str, Any] = {"always": [runner.plain], "prompts_per_block": BLOCK, "min_prompts": 4}
    settings = {"risk": RISK, "passes": PASSES, **defaults_of_race, **options}
    return module.race(
        runner,
        [StubArm(name) for name in names.split()],
        Workload("by hand", "tune", (prompt,) * num_prompts),
        defaults=[StubArm(name) for name in defaults.split()],
        **settings,
    )


@pytest.mark.parametrize("num_arms", [2, 5])
def test_equal_arms_rarely_leave(num_arms: int) -> None:
    """The probability that any of them leaves, at any of the eight looks, is at most ``RISK``: about 3 %.

    A risk that was spent anew at every look, and divided by the number of other arms alone, dropped one of two equal
    arms in 31 % of the races, one of four in 46 % and one of ten in 65 %.
    """
    names = " ".join(map(str, range(num_arms)))
    runner = TimedRunner({AR: 1.0, **dict.fromkeys(names.split(), 1.0)}, noise=0.05)
    races = [race(runner, names) for _ in range(400)]
    assert sum(len(done.remaining) < num_arms for done in races) / 400 <= RISK


@pytest.mark.parametrize("seconds", [15.0, 100.0])
def test_arms_that_run_briefly_leave_where_the_time_is_short(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first block, two arms on eight more prompts take 16 s."""
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    runner = TimedRunner({AR: 1.0, "hf": 1.0})
    options = {"passes": 1, "briefly": [StubArm("hf")], "ends": lambda _: False}
    done = race(runner, "", deadline=seconds, **options)
    assert len(done.runs[AR]) == 16 and len(done.runs["hf"]) == (16 if seconds > 16.0 else 8)


@pytest.mark.parametrize(("seconds", "num_default"), [(37.0, 4), (41.0, 8), (45.0, 12), (100.0, 16)])
def test_defaults_leave_before_kept_prompts_need_the_time(
    seconds: float, num_default: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every arm takes a second for a prompt. After the first block of 12 s, plain decoding and the tuned arm need 24 s
    more. What the runner expects of prompts has the warm-ups of the first ones in it, and says nothing.
    """
    now = [0.0]

    class Running(TimedRunner):
        def prompt_s(self, arms: Sequence[Arm]) -> float:
            return 10.0 * len(arms)

        def compare(self, arms: Sequence[Arm], workload: Workload, **options: Any) -> dict[str, list[Decoded]]:  # type: ignore[override]
            now[0] += len(arms) * len(workload.prompts)
            return super().compare(arms, workload, **options)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    runner = Running(dict.fromkeys((AR, "tuned", "chain"), 400.0))  # four prompts take a second on average
    options = {"always": [runner.plain, StubArm("tuned")], "prompts_per_block": 4, "kept_prompts": 16, "passes": 1}
    done = race(runner, "", "chain", deadline=seconds, ends=lambda _: False, **options)
    assert len(done.runs[AR]) == len(done.runs["tuned"]) == 16 and now[0] <= seconds
    assert len(done.runs["chain"]) == num_default and done.remaining_defaults == ["chain"]


def test_slower_arms_leave_and_the_others_continue() -> None:
    """Until one is left."""
    runner = TimedRunner({AR: 100.0, "slow": 70.0, "near": 50.5, "best": 50.0}, noise=0.03)
    done = race(runner, "slow near best")
    assert "slow" not in done.remaining and done.remaining[0] == "best"
    assert len(done.runs["slow"]) == 8 < len(done.runs["near"]) <= len(done.runs["best"]) == len(done.runs[AR])
    assert runner.compared[0][0] == {AR, "slow", "near", "best"} and "slow" not in runner.compared[1][0]


def test_defaults_leave_only_when_a_default_is_faster() -> None:
    """All defaults are slower than the candidates; the best of them is known in the end."""
    runner = TimedRunner({AR: 100.0, "one": 40.0, "other": 40.2, "chain": 60.0, "sage": 75.0}, noise=0.01)
    done = race(runner, "one other", "sage chain")
    assert done.remaining_defaults == ["chain"] and set(done.remaining) <= {"one", "other"}
    assert len(done.runs["sage"]) == 8 < len(done.runs["chain"]) == len(done.runs[AR])


def test_arms_leave_when_a_default_is_faster() -> None:
    runner = TimedRunner({AR: 100.0, "one": 60.0, "chain": 40.0}, noise=0.03)
    done = race(runner, "one", "chain")
    assert (done.remaining, done.remaining_defaults) == ([], ["chain"])
    assert len(done.runs[AR]) == 8, "one arm is left"


def test_undecided_defaults_do_not_hold_up_a_decided_winner() -> None:
    """They are significantly slower than the candidate, whichever of them is the faster one."""
    runner = TimedRunner({AR: 100.0, "one": 40.0, "chain": 60.0, "sage": 60.0}, noise=0.03)
    done = race(runner, "one", "chain sage")
    assert len(done.runs[AR]) == 8 and sorted(done.remaining_defaults) == ["chain", "sage"]


def test_equal_arms_run_to_the_end() -> None:
    """All prompts in every pass, each pass as a repeat of its own."""
    runner = TimedRunner({AR: 100.0, "one": 50.0, "other": 50.0}, noise=0.05)
    done = race(runner, "one other")
    assert sorted(done.remaining) == ["one", "other"]
    assert len(done.runs["one"]) == len(done.runs["other"]) == len(done.runs[AR]) == 16 * PASSES
    assert [repeat for _, repeat in runner.compared] == [n for n in range(PASSES) for _ in range(2)]


def test_a_race_may_go_on_or_end_otherwise() -> None:
    runner = TimedRunner({AR: 100.0, "one": 40.0, "other": 60.0})
    assert len(race(runner, "one other").runs["one"]) == 8
    assert len(race(runner, "one other", ends=lambda _: False).runs["one"]) == 16 * PASSES


@pytest.mark.parametrize(("num_in_time", "num_prompts"), [(0, 4), (5, 5), (8, 8), (11, 11), (1000, 64)])
def test_a_race_ends_with_the_last_prompt_in_time(num_in_time: int, num_prompts: int) -> None:
    """After ``min_prompts`` in any case."""
    runner = TimedRunner({AR: 100.0, "one": 50.0, "other": 50.0}, noise=0.05, num_in_time=num_in_time)
    done = race(runner, "one other")
    assert {name: len(runs) for name, runs in done.runs.items()} == dict.fromkeys((AR, "one", "other"), num_prompts)
