"""Attention to visual tokens, observed during the prefill of an sdpa model, against the weights of an eager model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from autotune.documents.subnet import VISUAL_RANKINGS, VisualRanking
from autotune.modeling.target import Prefilled, Target, even_scores
from tests.tiny_models import NUM_VISUAL_TOKENS, Inputs, Pair


@pytest.fixture(scope="module")
def eager_target(pair: Pair) -> Any:
    return AutoModelForImageTextToText.from_pretrained(pair.target_folder, attn_implementation="eager").eval()


def prefill(model: Any, inputs: Inputs, rankings: Sequence[VisualRanking] = ("text_after_image",)) -> Prefilled:
    target = Target(model)
    (prompt,) = target.encode(inputs).prompts
    return target.prefill(prompt, visual_rankings=rankings)


def obvious_scores(eager_target: Any, inputs: Inputs) -> dict[VisualRanking, Tensor]:
    """Means over heads and queries of the last layer's attention to each visual token."""
    is_visual = inputs["input_ids"][0] == eager_target.config.image_token_id
    with torch.inference_mode():
        attention = eager_target(**inputs, output_attentions=True).attentions[-1][0]  # [heads, tokens, tokens]
    length = len(is_visual)
    queries: dict[VisualRanking, range] = {
        "text_after_image": range(int(is_visual.nonzero()[-1]) + 1, length),
        "all_queries": range(length),
        "last_query": range(length - 1, length),
    }
    return {
        ranking: torch.stack([attention[:, row, is_visual] for row in rows]).mean((0, 1))
        for ranking, rows in queries.items()
    }


@pytest.mark.parametrize("at_once", [3, 256])
@pytest.mark.parametrize("prompt", ["image", "long"])
def test_scores_equal_those_of_an_eager_model(
    pair: Pair,
    eager_target: Any,
    prompts: dict[str, Inputs],
    prompt: str,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the attention weights are computed a few queries at a time or all at once."""
    monkeypatch.setattr("autotune.modeling.target.QUERIES_AT_ONCE", at_once)
    assert pair.target.config.text_config._attn_implementation == "sdpa", "otherwise this compares eager with eager"
    expected = obvious_scores(eager_target, prompts[prompt])
    with torch.inference_mode():
        scores = prefill(pair.target, prompts[prompt], VISUAL_RANKINGS).visual_scores
    assert all(of_ranking.shape == (NUM_VISUAL_TOKENS,) for of_ranking in scores.values())
    orders = {tuple(of_ranking.argsort().tolist()) for of_ranking in scores.values()}
    assert len(orders) == len(scores) == 5, "rankings that agree prove nothing"
    for ranking, of_ranking in expected.items():
        torch.testing.assert_close(scores[ranking], of_ranking, atol=1e-5, rtol=0)
        assert of_ranking.max() > 2 * of_ranking.min(), "a ranking of equal scores proves nothing"


def test_random_ranks_depend_on_the_prompts_tokens_only(
    pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is not observed for a ranking that does not use it."""
    monkeypatch.setattr("autotune.modeling.target.observed_attention", lambda *_: pytest.fail("observed"))
    with torch.inference_mode():
        first, again, other = (
            prefill(pair.target, prompts[name], ["random"]).visual_scores["random"]
            for name in ("image", "image", "long")
        )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 576, 2000])
def test_even_ranks_spread_every_share_of_the_tokens(count: int) -> None:
    """The largest gap between kept tokens is below three times the mean gap, and no column of an image has most of
    them.
    """
    scores = even_scores(count)
    assert len(set(scores.tolist())) == len(scores) == count
    for kept in range(1, count + 1, max(1, count // 20)):
        tokens = np.sort(np.argsort(-scores)[:kept])
        gaps = np.diff([-1, *tokens, count])
        assert gaps.max() <= max(2, 3 * count / kept), (count, kept)
    if count == 64:
        columns = np.bincount(np.argsort(-scores)[:16] % 8, minlength=8)
        assert columns.max() <= 4


def test_a_prompt_without_an_image_has_no_scores(pair: Pair, prompts: dict[str, Inputs]) -> None:
    with torch.inference_mode():
        prefilled = prefill(pair.target, prompts["text"])
    assert (prefilled.visual_scores, prefilled.prompt.num_visual_tokens) == ({}, 0)
