"""Replay counts the rounds of drafts of seven kinds at temperature 0.7, where proposals depend on the noise of their
positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.documents.provenance import ModelReference
from autotune.drafters.checkpoint import LoadedDraft, load_draft
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.replay.replay import replay
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import Workload, load_workload
from tests.drafters.test_eagle3 import write_head
from tests.drafters.test_feature_draft import agreeing_draft
from tests.drafters.test_mtp import random_head
from tests.replay.test_replay import BEAMS, EVERYTHING, KEEPS, assert_rounds_are_the_decoders, random_configurations
from tests.sample_documents import free_prices, write_image, write_workload
from tests.tiny_models import Pair

DRAFTS = ("independent", "retrieval", "dream", "star", "specvlm", "eagle3", "mtp")


@pytest.fixture(scope="module")
def workload_at_07(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """An answer that repeats itself, and one to an image."""
    folder = tmp_path_factory.mktemp("temperature")
    lines: list[dict[str, Any]] = [
        {"prompt": "Count to ten, then stop.", "top_k": 2, "max_new_tokens": 40, "seed": 0},
        {
            "prompt": "Read the digits row by row.",
            "images": [write_image(folder / "0.png", 0)],
            "top_p": 0.3,
            "seed": 2,
        },
    ]
    common = {"split": "tune", "max_new_tokens": 20, "temperature": 0.7}
    return load_workload(str(write_workload(folder, [{**common, **line} for line in lines])), "tune")


def draft_of(kind: str, pair: Pair, target: Target, folder: Path) -> LoadedDraft:
    if kind == "independent":
        return IndependentDraft(pair.draft)
    if kind == "retrieval":
        draft = RetrievalDraft()
        draft.attach(target)
        return draft
    if kind == "eagle3":
        return load_draft(str(write_head(folder / "head", "SpecForge/qwen3-235B-A22B")), target)
    if kind == "mtp":
        random_head(target).save(folder)
        return load_draft(str(folder), target)
    return agreeing_draft(kind, target, injection_layer=4)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", DRAFTS)
def test_replay_counts_the_rounds_of_every_draft(
    kind: str, pair: Pair, target: Target, recorder: Recorder, workload_at_07: Workload, processor: Any, tmp_path: Path
) -> None:
    """50 random trees of every policy, with every share of visual tokens that the draft can keep."""
    draft = draft_of(kind, pair, target, tmp_path)
    keeps = (1.0,) if kind == "retrieval" else KEEPS
    named = ModelReference(id=kind, sha256="")
    traces = {keep: recorder.trace(draft, named, workload_at_07, visual_keep=keep, bounds=EVERYTHING) for keep in keeps}
    decoder = Decoder(target, draft)
    num_accepted, num_replayed, num_missing = 0, 0, 0
    for configuration in random_configurations(50, seed=DRAFTS.index(kind)):
        keep = configuration.subnet.visual_keep if configuration.subnet.visual_keep in keeps else 1.0
        subnet = configuration.subnet.model_copy(update={"visual_keep": keep})
        configuration = configuration.model_copy(update={"subnet": subnet})
        assert_rounds_are_the_decoders(traces[keep], configuration, decoder, workload_at_07, processor)
        replayed = replay(traces[keep], parse_policy(configuration.tree), free_prices(), configuration.fallback)
        num_accepted += sum(int(lengths.sum()) for lengths in replayed.accepted_lengths)
        if configuration.tree["policy"] in BEAMS:
            num_replayed += len(workload_at_07.prompts)
            num_missing += int((replayed.missing > 0).sum())
    assert num_accepted > 20, "rounds that accept nothing show nothing"
    assert num_missing < num_replayed / 4, "prompts that a beam leaves are not compared"
