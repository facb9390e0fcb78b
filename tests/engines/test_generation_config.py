"""``autotune export --as generation-config`` in transformers' ``generate``: the tokens are plain decoding's, in fewer
passes, with drafts of the profile's length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import GenerationConfig

from autotune.cli.main import main
from tests.sample_documents import decoding_profile
from tests.tiny_models import Inputs, Pair

NEW_TOKENS = 48


@pytest.fixture
def prompt(text_pair: Pair) -> Inputs:
    """A prompt whose continuation repeats itself."""
    tokens = torch.tensor([[1, *[40, 41, 42, 43, 44] * 6]])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def exported(kind: str) -> Path:
    profile = decoding_profile()
    assert profile.point.draft is not None
    draft = profile.point.draft.model_copy(update={"kind": kind})
    profile.model_copy(update={"point": profile.point.model_copy(update={"draft": draft})}).save("profile.json")
    done = CliRunner().invoke(main, ["export", "profile.json", "--as", "generation-config", "-o", "generate.json"])
    assert done.exit_code == 0, done.output
    return Path("generate.json")


@torch.inference_mode()
def decode(model: Any, prompt: Inputs, **options: Any) -> tuple[list[int], list[int]]:
    """The new tokens, and the number of tokens of every pass of the model."""
    passes = list[int]()
    hook = model.register_forward_pre_hook(
        lambda _, __, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        tokens = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    finally:
        hook.remove()
    return tokens[0].tolist(), passes


def test_prompt_lookup_is_configured(
    text_pair: Pair, prompt: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = exported("retrieval")
    config = GenerationConfig.from_pretrained(path.parent, path.name)
    plain, passes = decode(text_pair.target, prompt)
    looked_up, fewer = decode(text_pair.target, prompt, generation_config=config)
    assert looked_up == plain and len(passes) == NEW_TOKENS > len(fewer)
    assert max(fewer[1:]) == 1 + 3  # the chain of the profile


def test_an_assistant_is_configured_by_its_own_config(
    text_pair: Pair, prompt: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, assistant = exported("independent"), text_pair.draft
    monkeypatch.setattr(
        assistant, "generation_config", GenerationConfig.from_dict(assistant.generation_config.to_dict())
    )
    plain, _ = decode(text_pair.target, prompt)
    unset, without = decode(text_pair.target, prompt, assistant_model=assistant)
    assistant.generation_config.update(**json.loads(path.read_text()))
    assisted, passes = decode(text_pair.target, prompt, assistant_model=assistant)
    assert plain == unset == assisted
    assert max(passes[1:]) == 1 + 3 < max(without[1:]) and len(passes) < NEW_TOKENS
