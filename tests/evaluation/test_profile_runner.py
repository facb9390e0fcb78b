"""A profile's own decoder as an arm: warmed up point by point, and what its fallbacks learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from autotune.documents.condition import Condition
from autotune.documents.decoding_profile import DecodingProfile
from autotune.evaluation.arms import HF, Arm
from autotune.evaluation.profile_runner import TUNED, ProfileArmRunner, points_used
from autotune.evaluation.runner import AR
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import LoadedPoint
from autotune.runtime.request import Call, Request
from autotune.trees.fallback import RequestMemory
from autotune.workloads.workload import Prompt, Workload, WorkloadPrompt
from tests.runtime.test_control import DEAR, stranger
from tests.sample_documents import decoding_profile
from tests.tiny_models import Pair

PROMPTS = Workload(
    "by hand",
    "evaluate",
    tuple(
        WorkloadPrompt(f"{number}", Prompt(prompt=f"Go on with {number}.", task=task, max_new_tokens=30), ())
        for number, task in enumerate(["hard", "easy", "hard", "easy", "hard", "hard"])
    ),
)


@pytest.fixture
def runner(pair: Pair, processor: Any) -> ProfileArmRunner:
    """Two points: a draft that never helps, and one that always does."""
    when = Condition(workload="hard")
    points = [LoadedPoint(stranger(), fallback=DEAR, when=when), LoadedPoint(pair.target, fallback=DEAR)]
    point = decoding_profile().point
    profile: DecodingProfile = decoding_profile().model_copy(
        update={"points": [point.model_copy(update={"when": when}), point]}
    )
    return ProfileArmRunner(Decoder(pair.target, points=points, processor=processor, profile=profile))


def test_every_point_is_warmed_up_once_and_learns_nothing_of_it(
    runner: ProfileArmRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The useless draft loses time in two requests and is then left alone: had the warm-ups counted, after the first."""
    begun: list[int] = []
    decode = runner.decoder._decode

    def noted(request: Request, call: Call) -> Iterator[list[int]]:
        begun.append(request.stats.point)
        return decode(request, call)

    monkeypatch.setattr(runner.decoder, "_decode", noted)
    runs = runner.compare([Arm(TUNED)], PROMPTS)[TUNED]
    assert [run.draft_forwards > 0 for run in runs] == [True, True, True, True, False, False]
    assert (begun.count(0), begun.count(1)) == (5, 3), "four prompts and two, and a warm-up each"
    assert [run.point for run in runs] == [int(prompt.settings.task == "easy") for prompt in PROMPTS.prompts]
    assert points_used(runner.decoder.profile, runs) == "4 by point 0 (workload hard), 2 by point 1 (any request)"
    assert runner.decoder.points[1].fallback.memory.num_failed == 0


def test_a_comparison_begins_with_nothing_learnt(runner: ProfileArmRunner) -> None:
    first = runner.compare([Arm(TUNED)], PROMPTS)[TUNED]
    assert runner.decoder.points[0].fallback.memory != RequestMemory()
    again = runner.compare([Arm(TUNED)], PROMPTS)[TUNED]
    assert [run.draft_forwards for run in again] == [run.draft_forwards for run in first]


def test_a_disturbed_run_teaches_nothing(runner: ProfileArmRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are the same whether the machine was busy or not: the useless draft does not lose one request twice."""
    arms = [Arm(AR), Arm(HF), Arm(TUNED)]  # two of three say what is usual
    expected = runner.compare(arms, PROMPTS)[TUNED]
    decode, disturbed = runner.decode, [PROMPTS.prompts[0]]

    def slowed(arm: Arm, inputs: Any, prompt: WorkloadPrompt) -> Any:
        tokens, stats = decode(arm, inputs, prompt)
        stats.target_prefill_ms = 10.0
        if arm.name == TUNED and prompt in disturbed:
            disturbed.remove(prompt)
            stats.target_prefill_ms = 1000.0
        return tokens, stats

    monkeypatch.setattr(runner, "decode", slowed)
    found = runner.compare(arms, PROMPTS)[TUNED]
    assert runner.num_disturbed >= 1
    assert [run.draft_forwards for run in found] == [run.draft_forwards for run in expected]
