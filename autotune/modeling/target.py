"""The target: a text runner that is told how much it attended to what it saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from autotune.modeling.prompt import Prompt
from autotune.modeling.self_check import check_tree_decoding
from autotune.modeling.tree_model import TreeModel
from autotune.modeling.visual_attention import LayerAttention, visual_scores, watched_attention


@dataclass(frozen=True)
class Prefilled:
    """What the prefill left behind. ``logits`` [vocabulary] follow the prompt's last token."""

    prompt: Prompt
    logits: Tensor
    visual_scores: Tensor | None
    """Mean last-layer attention to each visual token, [visual tokens], where it was asked for."""


class Target(TreeModel):
    """A transformers model as the decoding loop uses it. Its weights, config and classes are untouched.

    Raises:
        UserError: a model that trees cannot decode: see ``text_model_of`` and ``check_tree_decoding``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.max_context = self.text.max_context
        self.tokenizer: Any = None
        """Where it is known: it tells padding of the vocabulary from tokens."""
        check_tree_decoding(self)

    def prefill(self, prompt: Prompt, *, rank_visual_tokens: bool = False) -> Prefilled:
        """Run a prompt through all layers into the empty cache."""
        if not (rank_visual_tokens and prompt.num_visual_tokens):
            return Prefilled(prompt, self.read(prompt), None)
        scores: list[Tensor] = []

        def watch(attention: LayerAttention) -> None:
            if attention.layer == len(self.text.layers) - 1:
                scores.append(visual_scores(attention, 0, prompt.is_visual, len(prompt)))

        with watched_attention(self.text, watch):
            logits = self.read(prompt)
        assert scores, "the last layer did not go through the attention interface"
        return Prefilled(prompt, logits, scores[0])

    def step(self, token: int) -> Tensor:
        """Append one token (plain decoding); returns the logits after it, [vocabulary]."""
        logits = self.forward(np.array([token]), np.zeros(1, np.int64), np.zeros((1, 1), np.float32))
        self.cache.advance(1)
        return logits[0]
