"""``docs/first-profile-vlm.md``: a draft is trained for a public vision-language model and tuned for another GPU."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from autotune.documents.decoding_profile import DecodingProfile
from tests.hub import repositories, tiny
from tests.hub.conftest import asked
from tests.hub.server import Hub
from tests.hub.test_verbs import run
from tests.sample_documents import write_image
from tests.test_docs import PAGES, blocks, commands

PAGE = PAGES["first-profile-vlm.md"]


@pytest.mark.nightly
def test_the_profile_names_every_choice(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subnet, share of visual tokens, injection layer and the values of the tree, of a target deep enough to gain."""
    monkeypatch.setattr(tiny, "NUM_LAYERS", 28)
    torch.set_num_threads(1)
    folders = repositories.Folders(tmp_path_factory.mktemp("deep"))
    with asked(Hub(folders, {repositories.GATED}, dict(repositories.RENAMED)), tmp_path, monkeypatch):
        example, rows = json.loads(blocks(PAGE, "jsonl")[0]), []
        for number in range(12):
            image = write_image(Path(f"receipt-{number}.png"), number)
            text = f"What does line {number % 4} of this receipt say?"
            rows.append({**example, "prompt": text, "images": [image], "split": ["tune", "evaluate"][number % 2]})
        Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        for row in rows:
            del row["split"]
        Path("examples.jsonl").write_text("\n".join(map(json.dumps, rows)))
        Path("recipe.yaml").write_text(blocks(PAGE, "yaml")[0])
        for command in commands(PAGE):  # workers would ask the real Hub
            run(*shlex.split(command)[1:], *(["--jobs", "1"] if " search " in command else []))
    for name in ("profile-h100.json", "wetap.json"):
        point = DecodingProfile.load(tmp_path / name).point
        assert point.draft is not None and point.draft.kind == "star" and point.tree is not None
        assert point.draft.subnet.injection_layer is not None and point.draft.subnet.visual_keep <= 1
        assert point.predicted is not None and point.predicted.speedup > 1
    assert point.tree.policy == "wetap"
