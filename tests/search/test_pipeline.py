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
from autotune.modeling.graph_memory import GraphMemory, graph_memory
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
    arms, in_runs, kept = set(), [], []
    decode, keep = DecoderArm.decode, GraphMemory.keep

    def counted(arm: DecoderArm, *given: Any) -> Any:
        with rehearsal.counted() as counts:
            answer = decode(arm, *given)
        arms.add(arm.name)
        in_runs.append(counts.captures)
        return answer

    def kept_beside(memory: GraphMemory, forward: Any) -> Any:
        kept.append(len(memory) + 1)
        return keep(memory, forward)

    monkeypatch.setattr(DecoderArm, "decode", counted)
    monkeypatch.setattr(GraphMemory, "keep", kept_beside)
    monkeypatch.setattr(ProfileSelection, "candidates", lambda self, count: self.trees.fastest[:count])
    monkeypatch.setattr(finalists, "ROUNDS", ((4, 6, None),))
    monkeypatch.setattr(finalists, "MAX_PASSES", 1)
    monkeypatch.setattr(CostSettings, "time_limit_s", 10.0)
    _, workload = write_small_job(tmp_path)
    live = []
    for number in range(2):
        search(
            SearchSettings(
                target=str(pair.target_folder),
                drafts=(str(pair.draft_folder),),
                workload=workload,
                space=str(tmp_path / "small.yaml"),
                budget_s=900.0,
                num_trials=8,
                study=f"{number}",
                folder=tmp_path,
                output=tmp_path / f"{number}.json",
            ),
            Console(),
        )
        gc.collect()
        live.append(rehearsal.live_bytes)
    assert arms >= {"ar", "tuned", "finalist 6", *COMPARED_DEFAULTS} and set(in_runs) == {0}
    assert 0 < max(kept) <= graph_memory(torch.device("cuda:0")).limit / 2
    assert live[0] == live[1]
