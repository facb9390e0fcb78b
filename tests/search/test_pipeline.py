"""Whole searches on a rehearsed GPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.console import Console
from autotune.documents.published_defaults import COMPARED_DEFAULTS
from autotune.evaluation.arms import DecoderArm
from autotune.measuring.settings import CostSettings
from autotune.modeling.graph_memory import graph_memory
from autotune.search import finalists
from autotune.search.pipeline import search
from autotune.search.profile_selection import ProfileSelection
from autotune.search.settings import SearchSettings
from tests.cli.test_end_to_end import write_small_job
from tests.rehearsal import Rehearsal
from tests.tiny_models import Pair


@pytest.mark.nightly
def test_searches_capture_nothing_in_timed_runs_and_leave_no_memory(
    rehearsal: Rehearsal, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding, six finalists and all published defaults take at most half of the captures that a device keeps."""
    memory, decode, arms = graph_memory(torch.device("cuda:0")), DecoderArm.decode, set()

    def checked(arm: DecoderArm, *given: Any) -> Any:
        arms.add(arm.name)
        assert 0 < len(memory) <= memory.limit / 2
        with rehearsal.counted() as counts:
            answer = decode(arm, *given)
        assert counts.captures == 0, arm.name
        return answer

    monkeypatch.setattr(DecoderArm, "decode", checked)
    monkeypatch.setattr(ProfileSelection, "candidates", lambda self, count: self.trees.fastest[:count])
    monkeypatch.setattr(finalists, "ROUNDS", ((4, 6, None),))
    monkeypatch.setattr(finalists, "MAX_PASSES", 1)
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
