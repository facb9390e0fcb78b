"""The arms of ``benchmarks/peers.py`` emit the tokens of plain decoding."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from autotune.evaluation.runtime_arms import RuntimeArms  # noqa: E402
from autotune.runtime.decoder import Decoder  # noqa: E402
from autotune.workloads.prompt import Prompt  # noqa: E402
from benchmarks import peers  # noqa: E402
from tests.engines.conftest import SCRIPT, write_script  # noqa: E402
from tests.engines.recorded_llama import PART_S, TRANSCRIPT  # noqa: E402

if TYPE_CHECKING:
    from tests.tiny_models import Pair


def test_peers_emit_the_tokens_of_plain_decoding(text_pair: Pair) -> None:
    decoder = Decoder(text_pair.target, text_pair.draft, tree={"policy": "chain", "depth": 2})
    runtime = RuntimeArms(decoder)
    arms, notes = peers.peers_of(runtime, None)
    assert [arm.name for arm in arms] == ["hf", "hf-prompt-lookup", "hf-assisted"] and len(notes) == 1
    tokens = torch.tensor([[7, 30, 51, 9, 7, 30, 51]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    settings = Prompt(prompt="repeat", max_new_tokens=16)
    expected, _ = runtime.plain.generate(inputs, settings)
    for arm in arms:
        found, stats = arm.generate(inputs, settings)
        assert found == expected and stats.new_tokens == len(expected), arm.name
    assert text_pair.target.generation_config.prompt_lookup_num_tokens is None


def test_engines_emit_what_their_servers_stream(tmp_path: Path, text_pair: Pair) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF metadata tokenizer.chat_template")
    script = tmp_path / "llama-server"
    write_script(script, SCRIPT)
    with ExitStack() as stack:
        runtime = RuntimeArms(Decoder(text_pair.target))
        arms = peers.engine_arms(runtime, "llama.cpp", str(tmp_path / "model.gguf"), str(script), stack)
        assert [arm.name for arm in arms] == ["llama.cpp", "llama.cpp --spec-default ngram-mod(24,48,64)"]
        for row in json.loads(TRANSCRIPT.read_text())["prompts"][:2]:
            inputs = {"input_ids": torch.tensor([row["prompt_tokens"]])}
            for arm in arms:
                found, stats = arm.generate(inputs, Prompt(prompt="", max_new_tokens=8))
                assert found == row["tokens"][:8] and stats.new_tokens == 8
                assert stats.target_prefill_ms > 0 and stats.decode_ms > 0, (
                    "parts that wait in the socket are read at once"
                )
                assert stats.target_prefill_ms + stats.decode_ms > 7e3 * PART_S
