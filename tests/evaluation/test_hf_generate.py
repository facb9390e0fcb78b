"""Hugging Face's own generate as an arm: its tokens, its counts, and times that are sums of what the models took."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.logging import warning_once

from autotune.evaluation import hf_generate as module
from autotune.evaluation.hf_generate import hf_generate
from autotune.modeling import vision_timing
from tests.modeling.abacus import Abacus
from tests.tiny_models import Inputs, Pair

NEW_TOKENS = 24


def on(abacus: Abacus, monkeypatch: pytest.MonkeyPatch) -> Abacus:
    for variant in (module, vision_timing):
        monkeypatch.setattr(variant, "now_ms", abacus.now_ms)
    return abacus


@pytest.mark.parametrize("prompt", ["text", "image"])
def test_plain_generate_by_the_clock(
    pair: Pair, prompts: dict[str, Inputs], prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward takes 10 ms and vision 3: the first token is there after one forward, and each other after one more."""
    inputs = prompts[prompt]
    expected = pair.target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    with on(Abacus({pair.target: 10, pair.target.model.vision_tower: 3}), monkeypatch):
        tokens, stats = hf_generate(pair.target, inputs, max_new_tokens=NEW_TOKENS)
    assert tokens == expected[0, inputs["input_ids"].shape[1] :].tolist()
    steps = len(tokens) - 1
    assert stats.new_tokens == len(tokens) and stats.prompt_tokens == inputs["input_ids"].shape[1]
    assert stats.accepted_lengths == [0] * steps and stats.target_forwards == steps and stats.draft_forwards == 0
    assert stats.vision_ms == (3 if prompt == "image" else 0)
    assert stats.target_prefill_ms == 10 + stats.vision_ms
    assert (stats.decode_ms, stats.draft_prefill_ms) == (10 * steps, 0)


@pytest.mark.parametrize("prompt", ["text", "image"])
def test_assisted_generate_by_the_clock(
    pair: Pair, prompts: dict[str, Inputs], prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's forward takes 1 ms. All of them are decoding, and all of the target's but the first."""
    inputs = prompts[prompt]
    expected = pair.target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    costs = {pair.target: 10, pair.target.model.vision_tower: 3, pair.draft: 1}
    with on(Abacus(costs), monkeypatch) as abacus:
        tokens, stats = hf_generate(pair.target, inputs, max_new_tokens=NEW_TOKENS, assistant=pair.draft)
    assert tokens == expected[0, inputs["input_ids"].shape[1] :].tolist()
    assert stats.target_forwards == stats.rounds == abacus.num_forwards[pair.target]
    # Without the image, which generate does not give it, this draft agrees on nothing.
    assert (stats.rounds < len(tokens)) == (prompt == "text")
    assert sum(stats.accepted_lengths) + stats.rounds == len(tokens)
    assert stats.draft_forwards == abacus.num_forwards[pair.draft] > 0
    assert stats.target_prefill_ms == 10 + stats.vision_ms
    assert stats.draft_prefill_ms == 1
    assert stats.decode_ms == 10 * (stats.target_forwards - 1) + stats.draft_forwards
    assert not pair.target._forward_hooks and not pair.draft._forward_pre_hooks


def test_the_draft_of_a_text_model_helps(text_pair: Pair, prompts: dict[str, Inputs]) -> None:
    inputs = {"input_ids": prompts["text"]["input_ids"]}
    alone, _ = hf_generate(text_pair.target, inputs, max_new_tokens=NEW_TOKENS)
    assisted, stats = hf_generate(text_pair.target, inputs, max_new_tokens=NEW_TOKENS, assistant=text_pair.draft)
    assert assisted == alone and sum(stats.accepted_lengths) > 0


def test_sampling_is_repeated_by_the_seed(text_pair: Pair, prompts: dict[str, Inputs]) -> None:
    inputs = {"input_ids": prompts["text"]["input_ids"]}

    def sample(**settings: Any) -> list[int]:
        return hf_generate(text_pair.target, inputs, max_new_tokens=NEW_TOKENS, **settings)[0]

    assert sample(temperature=1.0, seed=1) == sample(temperature=1.0, seed=1) != sample(temperature=1.0, seed=2)
    assert sample(temperature=1.0, seed=1) != sample(seed=1) == sample(seed=2)


def test_it_is_quiet_and_leaves_transformers_as_it_was(
    text_pair: Pair, prompts: dict[str, Inputs], caplog: pytest.LogCaptureFixture
) -> None:
    """Assisted generation warns of how it calls itself, once in a process: here as if it never had."""
    inputs = {"input_ids": prompts["text"]["input_ids"]}
    warning_once.cache_clear()
    hf_generate(text_pair.target, inputs, max_new_tokens=4, assistant=text_pair.draft)
    assert not caplog.records
    warning_once.cache_clear()
    text_pair.target.generate(**inputs, max_new_tokens=4, assistant_model=text_pair.draft)
    assert caplog.records, "nothing to be quiet about"
