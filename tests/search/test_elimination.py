"""Finalists are eliminated once they are significantly slower."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune.documents.decoding_profile import AR
from autotune.evaluation.arms import Arm
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runs import Run
from autotune.search import elimination
from autotune.search.elimination import MAX_PASSES, PROMPTS_PER_ROUND, eliminate, is_significantly_slower
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.evaluation.sample_runs import run
from tests.evaluation.stub_arm import StubArm


class TimedRunner(ArmRunner):
    """Arms take a given time for every prompt, with seeded noise."""

    def __init__(self, ms: dict[str, float], noise: float = 0.0) -> None:
        self.plain = StubArm(AR)  # type: ignore[assignment]
        self.ms = ms
        self.noise = noise
        self.random = np.random.default_rng(1)
        self.compared: list[tuple[set[str], int, bool]] = []

    def compare(  # type: ignore[override]
        self, arms: Sequence[Arm], workload: Workload, *, repeat: int, keep_memory: bool, **_: Any
    ) -> dict[str, list[Run]]:
        self.compared.append(({arm.name for arm in arms}, repeat, keep_memory))
        prompts = 1 + np.arange(len(workload.prompts))  # some take longer, in every arm
        return {
            arm.name: [run(float(self.ms[arm.name] * n * self.random.normal(1, self.noise))) for n in prompts]
            for arm in arms
        }


def some_prompts(count: int) -> Workload:
    prompt = WorkloadPrompt("p", Prompt(prompt="p"), ())
    return Workload("by hand", "tune", (prompt,) * count)


def test_arms_are_eliminated_once_significantly_slower() -> None:
    """The others continue until one is left."""
    runner = TimedRunner({AR: 100.0, "slow": 70.0, "near": 50.5, "best": 50.0}, noise=0.03)
    found = eliminate(runner, [StubArm(name) for name in ("slow", "near", "best")], some_prompts(16))
    assert "slow" not in found.remaining and found.remaining[0] == "best"
    assert len(found.runs["slow"]) == 8 < len(found.runs["near"]) <= len(found.runs["best"]) == len(found.runs[AR])
    assert runner.compared[0][0] == {AR, "slow", "near", "best"} and "slow" not in runner.compared[1][0]


def test_defaults_leave_only_when_a_default_is_faster() -> None:
    """All defaults are slower than the candidates; the best of them is known in the end."""
    runner = TimedRunner({AR: 100.0, "one": 40.0, "other": 40.2, "chain": 60.0, "sage": 75.0}, noise=0.03)
    arms, defaults = [StubArm("one"), StubArm("other")], [StubArm("sage"), StubArm("chain")]
    found = eliminate(runner, arms, some_prompts(16), defaults=defaults)
    assert found.remaining_defaults == ["chain"] and set(found.remaining) <= {"one", "other"}
    assert len(found.runs["sage"]) == 8 < len(found.runs["chain"]) == len(found.runs[AR])


def test_candidates_leave_when_a_default_is_faster() -> None:
    runner = TimedRunner({AR: 100.0, "one": 60.0, "chain": 40.0}, noise=0.03)
    found = eliminate(runner, [StubArm("one")], some_prompts(16), defaults=[StubArm("chain")])
    assert (found.remaining, found.remaining_defaults) == ([], ["chain"])
    assert len(found.runs[AR]) == 8, "one arm is left"


def test_undecided_defaults_do_not_hold_up_a_decided_winner() -> None:
    """They are significantly slower than the candidate, whichever of them is the faster one."""
    runner = TimedRunner({AR: 100.0, "one": 40.0, "chain": 60.0, "sage": 60.0}, noise=0.03)
    found = eliminate(runner, [StubArm("one")], some_prompts(16), defaults=[StubArm("chain"), StubArm("sage")])
    assert len(found.runs[AR]) == 8 and sorted(found.remaining_defaults) == ["chain", "sage"]


def test_equal_arms_both_remain() -> None:
    """They run to the end: all prompts in every pass, each pass as a repeat of its own."""
    runner = TimedRunner({AR: 100.0, "one": 50.0, "other": 50.0}, noise=0.05)
    found = eliminate(runner, [StubArm("one"), StubArm("other")], some_prompts(16))
    assert sorted(found.remaining) == ["one", "other"]
    assert len(found.runs["one"]) == len(found.runs["other"]) == len(found.runs[AR]) == 16 * MAX_PASSES
    assert [repeat for _, repeat, _ in runner.compared] == [n for n in range(MAX_PASSES) for _ in range(2)]
    assert [keep_memory for _, _, keep_memory in runner.compared] == [False, *[True] * (2 * MAX_PASSES - 1)]


def test_the_test_keeps_its_risk() -> None:
    """With few and with many prompts: few false alarms, and real differences are found."""
    rng = np.random.default_rng(0)
    for count in (4, 8, 64):
        equal = [is_significantly_slower(*rng.normal(1, 0.05, (2, count)), risk=0.05) for _ in range(200)]
        assert sum(equal) / 200 < 0.09, count
        slower = [
            is_significantly_slower(1.2 * rng.normal(1, 0.05, count), rng.normal(1, 0.05, count), risk=0.05)
            for _ in range(100)
        ]
        assert sum(slower) / 100 > 0.9, count
    assert is_significantly_slower(np.full(4, 2.0), np.ones(4), risk=0.001)
    assert not is_significantly_slower(np.ones(4), np.ones(4), risk=0.5)


def test_the_test_is_a_paired_t_test_of_log_ratios() -> None:
    """Against Student's formula, written out."""
    from scipy.stats import t

    rng = np.random.default_rng(2)
    for count in (2, 8, 40):
        ms, than = rng.normal(1.02, 0.05, count), rng.normal(1, 0.05, count)
        ratios = np.log(ms / than)
        p_value = float(t.sf(ratios.mean() / (ratios.std(ddof=1) / count**0.5), count - 1))
        assert is_significantly_slower(ms, than, risk=p_value * 1.000001)
        assert not is_significantly_slower(ms, than, risk=p_value * 0.999999)


def test_an_elimination_ends_after_a_block_once_time_is_up() -> None:
    runner = TimedRunner({AR: 100.0, "one": 50.0, "other": 50.0}, noise=0.05)
    found = eliminate(runner, [StubArm("one"), StubArm("other")], some_prompts(16), deadline=time.monotonic() - 1)
    assert len(found.runs[AR]) == PROMPTS_PER_ROUND and len(runner.compared) == 1


def test_a_block_that_would_be_late_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block takes ten seconds."""
    for seconds, blocks in ((5.0, 1), (19.0, 1), (21.0, 2), (29.0, 2), (31.0, 3)):
        runner = TimedRunner({AR: 100.0, "one": 50.0, "other": 50.0}, noise=0.05)
        clock = SimpleNamespace(monotonic=lambda runner=runner: 10.0 * len(runner.compared))
        monkeypatch.setattr(elimination, "time", clock)
        eliminate(runner, [StubArm("one"), StubArm("other")], some_prompts(16), deadline=seconds)
        assert len(runner.compared) == blocks, seconds
