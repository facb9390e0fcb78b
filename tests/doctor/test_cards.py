"""Doctor says how many cards of a kind a target needs, by its config alone."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from transformers import LlamaConfig

from autotune.cli.main import main

SIZES = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8}


def test_a_70b_needs_four_cards_of_80_gb(tmp_path: Path) -> None:
    """141 GB of weights: two H200 hold them. Two H100 do not, because each would hold embedding and head whole."""
    LlamaConfig(**SIZES, **HEADS, dtype="bfloat16", tie_word_embeddings=False).save_pretrained(tmp_path)
    for card, needed in {
        "h100": "NVIDIA H100 SXM5 80GB that hold the target, by tokens of context: 4 with 4,096, 4 with 32,768, 4 with 131,072",
        "4xh200": "NVIDIA H200 SXM 141GB that hold the target, by tokens of context: 2 with 4,096, 2 with 32,768, 2 with",
        "t4": "NVIDIA T4 that hold the target, by tokens of context: none with 4,096, none with 32,768, none with 131,072",
    }.items():
        done = CliRunner().invoke(main, ["doctor", "--target", str(tmp_path), "--gpu", card, "--json"])
        assert done.exit_code == 0, done.output
        diagnosis = json.loads(done.stdout)
        assert diagnosis["target"] is None and any(needed in note for note in diagnosis["notes"]), diagnosis["notes"]
