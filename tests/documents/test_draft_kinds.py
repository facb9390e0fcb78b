"""Block-diffusion drafts (DFlash) are recognised in their three published forms, and refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from autotune.drafters.checkpoint import load_draft
from autotune.modeling.loading import load_model
from autotune.modeling.target import Target
from tests.obvious import refused
from tests.tiny_models import VOCABULARY_SIZE, Pair

LAYER = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY_SIZE}
DFLASH: dict[str, dict[str, Any]] = {
    "authors": {**LAYER, "architectures": ["DFlashDraftModel"], "block_size": 6},
    "authors without an architecture": {**LAYER, "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3]}},
    "speculators": {"speculators_model_type": "dflash", "transformer_layer_config": LAYER, "draft_vocab_size": 9},
    "transformers": {**LAYER, "block_size": 6, "mask_token_id": 9, "target_layer_ids": [1, 3]},
}
"""Configs, by the form in which a draft is published."""


def write_dflash(folder: Path, form: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DFLASH[form]))
    save_file({"fc.weight": torch.zeros(32, 64)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("form", DFLASH)
def test_a_dflash_draft_is_refused_in_a_line_that_names_where_it_runs(
    text_pair: Pair, tmp_path: Path, form: str
) -> None:
    """As a draft, and in place of a whole model."""
    name = str(write_dflash(tmp_path / "draft", form))
    message = f"^{name}: drafts of kind dflash .*; give a draft of another kind, or .* --speculative-config .*{name}"
    for load in (lambda: load_draft(name, Target(text_pair.target)), lambda: load_model(name)):
        with refused(message) as caught:
            load()
        assert "\n" not in str(caught.value)
