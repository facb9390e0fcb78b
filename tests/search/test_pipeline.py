"""Whole searches: what their studies keep, and searches on a rehearsed GPU."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.published_defaults import COMPARED_DEFAULTS
from autotune.evaluation.runtime_arms import DecoderArm
from autotune.measuring.settings import CostSettings
from autotune.modeling.graph_memory import graph_memory
from autotune.report.page import render
from autotune.report.sources import find_sources
from autotune.search import finalists, thresholds
from autotune.search.pipeline import search
from autotune.search.tuning import StageClock
from autotune.study.ledger import Ledger
from autotune.study.search_settings import SearchSettings
from tests.cli.test_end_to_end import write_small_job
from tests.rehearsal import Rehearsal
from tests.search.conftest import Searched
from tests.tiny_models import Pair


def estimated_search(pair: Pair, folder: Path, **options: Any) -> DecodingProfile:
    """A small search for another device, with documents in ``folder``."""
    models = {"target": str(pair.target_folder), "drafts": (str(pair.draft_folder),), "gpu": "h100", "jobs": 1}
    job = {"workload": write_small_job(folder)[1], "space": str(folder / "small.yaml")}
    places = {"folder": folder / ".autotune", "output": folder / "profile.json"}
    return search(SearchSettings(**models | options, **job, **places, budget_s=60), Console())


def test_a_search_for_two_cards_has_their_prices(pair: Pair, tmp_path: Path) -> None:
    """Replay takes them as those of one card; the profile and its cost table name both cards."""
    profile = estimated_search(pair, tmp_path, num_trials=2, gpu="2xh100")
    found = find_sources(tmp_path / "profile.json")
    assert found.table is not None and found.table.device == profile.hardware
    assert profile.hardware.name == "2xh100" and profile.hardware.model.startswith("2xNVIDIA H100")
    assert profile.point.predicted is not None and profile.point.predicted.estimated and profile.point.measured is None
    assert "2xNVIDIA H100 SXM5 80GB, float32, mode cuda-graph" in render(found)


@pytest.mark.nightly
def test_a_search_that_is_interrupted_ends_with_the_same_winner(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted again and again, each time after two more records."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "interrupted").mkdir()
    whole = estimated_search(pair, tmp_path / "whole", num_trials=60)
    put, num_interrupted = Ledger.put, 0
    left = iter(())  # records until the next interruption

    def put_some(ledger: Ledger, key: str, record: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        put(ledger, key, record)

    monkeypatch.setattr(Ledger, "put", put_some)
    profile = None
    while profile is None:
        left = iter(range(2))
        try:
            profile = estimated_search(pair, tmp_path / "interrupted", num_trials=60)
        except KeyboardInterrupt:
            num_interrupted += 1
    assert num_interrupted >= 2 and profile.point == whole.point


def test_the_study_of_a_cut_search_has_its_records(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the traces hold fewer prompts than planned, the profile's study is still found with all it recorded."""
    deadline_of = StageClock.deadline_of
    late = {"traces": time.monotonic() - 1}
    monkeypatch.setattr(StageClock, "deadline_of", lambda clock, name: late.get(name) or deadline_of(clock, name))
    monkeypatch.setattr(thresholds, "MIN_TRACED_PROMPTS", 2)
    estimated_search(pair, tmp_path, num_trials=2)
    assert "2 of 4 prompts were recorded" in capsys.readouterr().err
    found = find_sources(tmp_path / "profile.json")
    assert found.notes == [] and found.study is not None and found.candidates
    assert {trace.num_prompts for trace in found.traces} == {2}


def test_the_budget_stands_still_while_a_worker_waits_for_its_turn(searched: Searched, tmp_path: Path) -> None:
    said: list[str] = []
    storage, clock = f"sqlite:///{tmp_path / 'shared'}", StageClock(60.0)
    settings = searched.tuning.settings.model_copy(update={"storage": storage})
    tuning = replace(searched.tuning, settings=settings, clock=clock, console=SimpleNamespace(say=said.append))
    before = clock.deadline

    def compute() -> None:
        with tuning.turn("traces"):
            pass

    with ThreadPoolExecutor(1) as pool, Ledger(storage).turn("cost table", said.append, is_timed=True):
        computed = pool.submit(compute)
        while not said:
            time.sleep(0.01)
        time.sleep(0.2)
    computed.result()
    assert said == ["traces: waiting for other workers of this host, because what is timed runs alone"]
    assert clock.deadline >= before + 0.2


@pytest.mark.nightly
def test_searches_capture_nothing_in_timed_runs_and_leave_no_memory(
    rehearsal: Rehearsal, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding, six finalists and all published defaults take at most half of the captures that a device
    keeps.
    """
    memory, generate, arms = graph_memory(torch.device("cuda:0")), DecoderArm.generate, set()

    def checked(arm: DecoderArm, *given: Any) -> Any:
        arms.add(arm.name)
        assert 0 < len(memory) <= memory.limit / 2
        with rehearsal.counted() as counts:
            answer = generate(arm, *given)
        assert counts.captures == 0, arm.name
        return answer

    monkeypatch.setattr(DecoderArm, "generate", checked)
    monkeypatch.setattr(finalists, "choose_finalists", lambda fastest, evaluator, count: fastest[:count])
    monkeypatch.setattr(thresholds, "RACE_SIZES", ((4, 6, None), (4, 2, 2)))
    monkeypatch.setattr(thresholds, "MAX_PASSES", 1)
    monkeypatch.setattr(CostSettings, "time_limit_s", 10.0)
    models = {"target": str(pair.target_folder), "drafts": (str(pair.draft_folder),)}
    job = {"workload": write_small_job(tmp_path)[1], "space": str(tmp_path / "small.yaml"), "folder": tmp_path}
    live = []
    for study in ("first", "second"):
        output = tmp_path / f"{study}.json"
        settings = SearchSettings(**models, **job, study=study, output=output, budget_s=900, num_trials=8)
        search(settings, Console())
        gc.collect()
        live.append(rehearsal.live_bytes)
    assert arms >= {"ar", "tuned", "finalist 6", *COMPARED_DEFAULTS}
    assert live[0] == live[1]
