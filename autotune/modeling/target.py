"""The target model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autotune.documents.captured_steps import CapturedSteps
from autotune.documents.subnet import VisualRanking
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.self_check import check_tree_decoding
from autotune.modeling.tree_model import TreeModel
from autotune.modeling.visual_attention import NEED_ATTENTION, LayerAttention, observed_attention, visual_scores

NOISE_ROWS = 64  # positions that two rounds of the deepest trees reach, and some more


@dataclass(frozen=True)
class Prefilled:
    """Result of a prefill."""

    prompt: EncodedPrompt
    logits: Tensor  # after the prompt's last token, [vocabulary]
    visual_scores: Mapping[VisualRanking, Tensor]
    """Scores of the visual tokens by each requested ranking, [visual tokens]; empty without an image."""


class Target(TreeModel):
    """A ``TreeModel`` that is decoded: it ranks the visual tokens of a prompt."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.max_context = self.text.max_context
        self.tokenizer: Any = None  # tells tokens from padding of the vocabulary; None if unknown
        self.captured_steps: CapturedSteps | None = None
        """Result of the self-test of captured steps, once mode ``auto`` has asked for it."""
        check_tree_decoding(self)

    @cached_property
    def noise(self) -> Tensor:
        """The noise of positions, which captured steps of drafts read, [``NOISE_ROWS``, vocabulary]."""
        return torch.zeros(NOISE_ROWS, self.vocab_size, device=self.device)

    def embeddings(self, prompt: EncodedPrompt) -> Tensor:
        """Inputs of the first layer [n, hidden]: the prompt's own embeddings, or those of its tokens."""
        if prompt.embeddings is not None:
            return prompt.embeddings[0]
        embeddings: Tensor = self.text.module.get_input_embeddings()(prompt.tokens)
        return embeddings

    def prefill(self, prompt: EncodedPrompt, *, visual_rankings: Sequence[VisualRanking] = ()) -> Prefilled:
        """Run a prompt through all layers into the empty cache, and rank its visual tokens."""
        rankings = visual_rankings if prompt.num_visual_tokens else ()
        if NEED_ATTENTION.isdisjoint(rankings):
            logits = self.prefill_prompt(prompt)
            scores = {ranking: visual_scores(ranking, prompt.tokens, prompt.is_visual) for ranking in rankings}
            return Prefilled(prompt, logits, scores)
        scores = {}

        def rank_by_last_layer(attention: LayerAttention) -> None:
            if attention.layer == self.text.attending_layers[-1]:
                for ranking in rankings:
                    scores[ranking] = visual_scores(ranking, prompt.tokens, prompt.is_visual, attention)

        with observed_attention(self.text, rank_by_last_layer):
            logits = self.prefill_prompt(prompt, in_one_pass=True)
        assert scores, "the last layer with attention did not use the attention interface"
        return Prefilled(prompt, logits, scores)
