"""Processes record together, and end in time."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from autotune.console import Console
from autotune.documents.subnet import Subnet
from autotune.recording.traces import Recording, record_traces
from autotune.runtime.model_pool import ModelPool
from autotune.workloads.workload import Workload
from tests.evaluation.conftest import evaluate
from tests.tiny_models import Pair

__all__ = ["evaluate"]
NUM_LEAST = 6


@pytest.fixture(scope="module")
def pool(pair: Pair) -> ModelPool:
    return ModelPool(str(pair.target_folder), [str(pair.draft_folder)], "cpu")


@pytest.fixture
def many(evaluate: Workload) -> Workload:
    """24 prompts."""
    return Workload("x", "tune", tuple(replace(p, name=f"{n} {p.name}") for n in range(8) for p in evaluate.prompts))


def test_traces_end_at_their_deadline(
    pool: ModelPool, many: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All variants are recorded on the same first prompts, and these traces equal those of whole recordings."""
    variants = [(draft, Subnet(visual_keep=keep)) for draft in pool.references for keep in (1.0, 0.5)]
    over = time.monotonic() - 1
    late = record_traces(pool, variants, many, tmp_path, Console(), jobs=1, deadline=over, num_least=NUM_LEAST)
    count = late[0].num_prompts
    assert [trace.num_prompts for trace in late] == [count] * 2 and NUM_LEAST <= count < len(many.prompts)
    assert f"{count} of {len(many.prompts)} prompts were recorded" in capsys.readouterr().err
    whole = record_traces(pool, variants, many.cut(count), tmp_path, Console())
    for one, other in zip(late, whole, strict=True):
        np.testing.assert_array_equal(one.forest.child_token, other.forest.child_token)
        assert one.header.workload_sha256 == many.cut(count).sha256


@pytest.mark.parametrize(
    ("deadline", "limit", "count"), [(60.0, 90.0, 12), (15.0, 90.0, NUM_LEAST), (15.0, 29.0, 4), (0.0, 0.0, 2)]
)
def test_recording_begins_nothing_that_would_end_late(
    pool: ModelPool,
    many: Workload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deadline: float,
    limit: float,
    count: int,
) -> None:
    """Parts take 10 s each. The least may pass the deadline, and not the limit; more must end before the deadline."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("autotune.recording.traces.time", clock)
    recording = Recording(pool, [], many, tmp_path, num_processes=2, limit=limit, num_least=NUM_LEAST)
    done = recording.record(many, 2, deadline, lambda _: setattr(clock, "now", clock.now + 10.0))
    assert done == count and clock.now <= max(deadline, limit, 10.0)


def test_every_prompt_is_recorded_by_one_process(pool: ModelPool, many: Workload, tmp_path: Path) -> None:
    """Workers take their own prompts; the first process takes all that are missing."""
    made: list[list[str]] = []
    for rank in range(3):
        recording = Recording(pool, [], many, tmp_path, rank=rank, num_processes=3)
        parts: list[str] = []
        recording.record(many, 2, math.inf, lambda part, parts=parts: parts.extend(p.name for p in part.prompts))
        made.append(parts)
    assert sorted(made[0]) == sorted(prompt.name for prompt in many.prompts)
    assert not set(made[1]) & set(made[2])
