"""The arms of ``benchmarks/peers.py`` emit the tokens of plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from autotune.evaluation.runner import ArmRunner  # noqa: E402
from autotune.runtime.decoder import Decoder  # noqa: E402
from autotune.workloads.prompt import Prompt  # noqa: E402
from benchmarks import peers  # noqa: E402

if TYPE_CHECKING:
    from tests.tiny_models import Pair


def test_peers_emit_the_tokens_of_plain_decoding(text_pair: Pair) -> None:
    decoder = Decoder(text_pair.target, text_pair.draft, tree={"policy": "chain", "depth": 2})
    runner = ArmRunner(decoder, None)
    arms, notes = peers.peers_of(runner, None)
    assert [arm.name for arm in arms] == ["hf", "hf-prompt-lookup", "hf-assisted"] and len(notes) == 1
    tokens = torch.tensor([[7, 30, 51, 9, 7, 30, 51]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    settings = Prompt(prompt="repeat", max_new_tokens=16)
    expected, _ = runner.plain.decode(inputs, settings)
    for arm in arms:
        found, stats = arm.decode(inputs, settings)
        assert found == expected and stats.new_tokens == len(expected), arm.name
    assert text_pair.target.generation_config.prompt_lookup_num_tokens is None
