"""Attention to visual tokens, observed during the prefill of an sdpa model, against the weights of an eager model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from autotune.modeling.target import Prefilled, Target
from autotune.modeling.visual_attention import observed_attention
from tests.tiny_models import NUM_VISUAL_TOKENS, Inputs, Pair


@pytest.fixture(scope="module")
def eager_target(pair: Pair) -> Any:
    return AutoModelForImageTextToText.from_pretrained(pair.target_folder, attn_implementation="eager").eval()


def prefill(model: Any, inputs: Inputs, *, rank_visual_tokens: bool = True) -> Prefilled:
    target = Target(model)
    (prompt,) = target.encode(inputs).prompts
    return target.prefill(prompt, rank_visual_tokens=rank_visual_tokens)


def obvious_scores(eager_target: Any, inputs: Inputs) -> Tensor:
    """Mean over heads and the text after the image of the last layer's attention to each visual token."""
    is_visual = inputs["input_ids"][0] == eager_target.config.image_token_id
    with torch.inference_mode():
        attention = eager_target(**inputs, output_attentions=True).attentions[-1][0]  # [heads, tokens, tokens]
    text_after = range(int(is_visual.nonzero()[-1]) + 1, len(is_visual))
    return torch.stack([attention[:, row, is_visual] for row in text_after]).mean((0, 1))


@pytest.mark.parametrize("prompt", ["image", "long"])
def test_scores_equal_those_of_an_eager_model(
    pair: Pair, eager_target: Any, prompts: dict[str, Inputs], prompt: str
) -> None:
    assert pair.target.config.text_config._attn_implementation == "sdpa", "otherwise this compares eager with eager"
    expected = obvious_scores(eager_target, prompts[prompt])
    with torch.inference_mode():
        scores = prefill(pair.target, prompts[prompt]).visual_scores
    assert scores is not None and scores.shape == (NUM_VISUAL_TOKENS,)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    assert expected.max() > 2 * expected.min(), "a ranking of equal scores proves nothing"


def test_an_eager_target_is_observed_too(eager_target: Any, prompts: dict[str, Inputs]) -> None:
    """Its attention is a function in the model's module, which transformers' table does not list."""
    with torch.inference_mode():
        scores = prefill(eager_target, prompts["image"]).visual_scores
    torch.testing.assert_close(scores, obvious_scores(eager_target, prompts["image"]), atol=1e-5, rtol=0)


def test_an_image_that_ends_the_prompt_is_ranked_by_its_last_token(
    pair: Pair, eager_target: Any, prompts: dict[str, Inputs]
) -> None:
    """There is no text after it."""
    ids = prompts["image"]["input_ids"]
    end = int((ids[0] == eager_target.config.image_token_id).nonzero()[-1]) + 1
    inputs = {"input_ids": ids[:, :end], "pixel_values": prompts["image"]["pixel_values"]}
    with torch.inference_mode():
        scores = prefill(pair.target, inputs).visual_scores
        attention = eager_target(**inputs, output_attentions=True).attentions[-1][0]
    torch.testing.assert_close(scores, attention[:, -1, end - NUM_VISUAL_TOKENS :].mean(0), atol=1e-5, rtol=0)


def test_observing_does_not_change_logits(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """They are bitwise equal: every layer runs its own kernel."""
    with torch.inference_mode():
        observed = prefill(pair.target, prompts["image"]).logits.clone()
        assert torch.equal(observed, prefill(pair.target, prompts["image"], rank_visual_tokens=False).logits)


def test_a_prompt_without_an_image_has_no_scores(pair: Pair, prompts: dict[str, Inputs]) -> None:
    with torch.inference_mode():
        prefilled = prefill(pair.target, prompts["text"])
    assert (prefilled.visual_scores, prefilled.prompt.num_visual_tokens) == (None, 0)


def test_the_config_is_restored(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Saved models and later calls are not affected, even after an error inside the context."""
    target = Target(pair.target)
    before = pair.target.config.to_dict()
    with torch.inference_mode():
        prefill(pair.target, prompts["image"])
    assert pair.target.config.to_dict() == before
    config = target.text.config
    with pytest.raises(ZeroDivisionError), observed_attention(target.text, lambda attention: None):
        assert config._attn_implementation != "sdpa"
        raise ZeroDivisionError
    assert config._attn_implementation == "sdpa"
    assert pair.target.config.to_dict() == before
