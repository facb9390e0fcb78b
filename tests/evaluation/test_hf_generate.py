"""Hugging Face's own generate as an arm: its tokens, its counts, and times that are sums of what the models took."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.evaluation import runtime_arms
from autotune.evaluation.runtime_arms import hf_generate
from autotune.modeling import vision_timing
from tests.tiny_models import Inputs, Pair

NEW_TOKENS = 24


class Abacus:
    """A clock that only forward passes advance, by their costs, so that times are exact sums."""

    def __init__(self, costs_ms: dict[Any, int]) -> None:
        self.costs_ms = costs_ms
        self.ms = 0.0
        self.num_forwards = dict.fromkeys(costs_ms, 0)

    def now_ms(self, _device: Any) -> float:
        return self.ms

    def __enter__(self) -> Abacus:
        # Registered before the hooks of the code under test, so that time has passed when those read the clock.
        self.handles = [module.register_forward_hook(self._pass_time) for module in self.costs_ms]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _pass_time(self, module: Any, *_: Any) -> None:
        self.ms += self.costs_ms[module]
        self.num_forwards[module] += 1


@pytest.mark.parametrize("prompt", ["text", "image"])
@pytest.mark.parametrize("is_assisted", [False, True])
def test_generate_by_the_clock(
    is_assisted: bool, prompt: str, pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward takes 10 ms, vision 3, and a draft's forward 1. The first forward of the target is the prefill, and all
    others are decoding, as those of the draft are.
    """
    inputs, target = prompts[prompt], pair.target
    expected = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    abacus = Abacus({target: 10, target.model.vision_tower: 3, pair.draft: 1})
    for variant in (runtime_arms, vision_timing):
        monkeypatch.setattr(variant, "now_ms", abacus.now_ms)
    with abacus:
        tokens, stats = hf_generate(
            target, inputs, max_new_tokens=NEW_TOKENS, assistant=pair.draft if is_assisted else None
        )
    assert tokens == expected[0, inputs["input_ids"].shape[1] :].tolist()
    assert stats.new_tokens == len(tokens) and stats.prompt_tokens == inputs["input_ids"].shape[1]
    assert stats.vision_ms == (3 if prompt == "image" else 0)
    assert stats.target_prefill_ms == 10 + stats.vision_ms and stats.draft_prefill_ms == is_assisted
    assert stats.target_forwards == stats.rounds == abacus.num_forwards[target] - (not is_assisted)
    assert stats.draft_forwards == abacus.num_forwards[pair.draft] and (stats.draft_forwards > 0) == is_assisted
    assert stats.decode_ms == 10 * (abacus.num_forwards[target] - 1) + stats.draft_forwards
    # Without the image, which generate does not give it, this draft agrees on nothing.
    assert (sum(stats.accepted_lengths) > 0) == (is_assisted and prompt == "text")
    assert sum(stats.accepted_lengths) + stats.rounds == len(tokens) - (not is_assisted)
    assert not target._forward_hooks and not pair.draft._forward_pre_hooks


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
