"""The draft of ``docs/adding-a-draft.md``, added as the page says: one file and one entry of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.documents import draft_kinds
from autotune.drafters import checkpoint
from autotune.drafters.checkpoint import load_draft
from autotune.modeling import loading
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.replay.reference_replay import rounds
from autotune.replay.trace import bounds_for
from autotune.runtime.decoder import Decoder
from autotune.study.spaces import load_space
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import Workload, load_workload
from tests.imports import ROOT
from tests.pages import added_module, code_block
from tests.sample_documents import write_workload
from tests.tiny_models import Pair

PAGE = "adding-a-draft.md"
TREES: list[dict[str, Any]] = [
    {"policy": "chain", "depth": 3},
    {"policy": "eagle2", "depth": 3, "k": 2, "budget": 5},
    {"policy": "sage", "d_max": 4},
]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the page as a module, and its entry in the table of kinds."""
    added_module(PAGE, "autotune.drafters.bigram", monkeypatch)
    first_line, line = code_block(PAGE, "diff").splitlines()
    assert first_line.strip() in (ROOT / "autotune" / "documents" / "draft_kinds.py").read_text()
    kinds = eval(f"{{{line.removeprefix('+')}}}", {"DraftKind": draft_kinds.DraftKind})
    for name, kind in kinds.items():
        monkeypatch.setitem(draft_kinds.KINDS, name, kind)
        for user in (draft_kinds, checkpoint, loading):
            monkeypatch.setattr(user, "TOKEN_DRAFTS", (*draft_kinds.TOKEN_DRAFTS, name))


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    repeated = "One, two, three. One, two, three. One,"
    settings = {"prompt": repeated, "seed": 3, "split": "tune", "max_new_tokens": 24}
    return load_workload(str(write_workload(tmp_path, [settings | {"temperature": t} for t in (0.0, 0.8)])), "tune")


@pytest.mark.usefixtures("added")
def test_the_draft_of_the_page_decodes_is_recorded_and_replayed(
    pair: Pair, processor: Any, workload: Workload, tmp_path: Path
) -> None:
    target = Target(pair.target)
    draft = load_draft("bigram", target)
    assert draft.kind == "bigram" and not draft.shape.has_forward_pass
    trees = [parse_policy(tree) for tree in TREES]
    recorder = Recorder(target, reference("bigram"), processor, tmp_path)
    trace = recorder.trace(draft, reference("bigram"), workload, visual_keep=1.0, bounds=bounds_for(trees))
    plain = Decoder(target, processor=processor)
    for tree in trees:
        decoder = Decoder(target, draft, tree=tree, processor=processor)
        for number, prompt in enumerate(workload.prompts):
            inputs = prompt.inputs(processor, torch.device("cpu"))
            found = decoder.generate(**inputs, **prompt.settings.generation)
            expected = plain.generate(**inputs, **prompt.settings.generation)
            assert torch.equal(found.sequences, expected.sequences)
            assert found.stats.accepted_lengths == [len(one.path) for one in rounds(trace, number, tree)]
    assert trace.forest.child_token.max() >= 0, "something was proposed"


@pytest.mark.usefixtures("added")
def test_a_search_may_choose_what_the_draft_of_the_page_has(pair: Pair) -> None:
    draft = load_draft("bigram", Target(pair.target))
    subnets = load_space("quick").without_images().subnets("bigram", draft.subnet, *draft.dimensions)
    assert subnets == [draft.subnet]
