"""The target model, whose attention to visual tokens is observed without switching it to eager attention.

transformers dispatches attention by a name in the text config. For one forward pass the config names a function of this
module, which passes each layer's queries and keys to a callback and then runs the layer's own kernel. The callback
computes the rows of attention that it needs, never the full matrix.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autotune.documents.captured_steps import CapturedSteps
from autotune.documents.subnet import VisualRanking
from autotune.modeling.attention import attention_function
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.self_check import check_tree_decoding
from autotune.modeling.text_model import TextModel
from autotune.modeling.tree_model import TreeModel

NEED_ATTENTION: frozenset[VisualRanking] = frozenset({"text_after_image", "all_queries", "last_query"})
QUERIES_AT_ONCE = 256  # rows of attention weights that are in memory together
GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention in the prefill of whole prompts: query [batch, heads, n, d], key [batch, kv heads,
    n, d].
    """

    layer: int
    query: Tensor
    key: Tensor
    scaling: float
    softcap: float | None
    window: int | None

    def mean_weights(self, row: int, queries: Tensor) -> Tensor:
        """Attention that each token of a batch row receives, the mean over heads and some queries, [n]."""
        parts = [self.weights(row, part).mean(0).sum(0) for part in queries.split(QUERIES_AT_ONCE)]
        return torch.stack(parts).sum(0) / len(queries)

    def weights(self, row: int, queries: Tensor) -> Tensor:
        """Attention weights of some tokens of a batch row, [heads, queries, n]. Weights outside the causal window are
        0.
        """
        key = self.key[row].repeat_interleave(self.query.shape[1] // self.key.shape[1], dim=0)
        logits = (self.query[row, :, queries] @ key.transpose(1, 2)).float() * self.scaling
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        columns = torch.arange(key.shape[1], device=key.device)
        is_hidden = columns > queries[:, None]
        if self.window is not None:
            is_hidden = is_hidden | (columns <= queries[:, None] - self.window)
        return logits.masked_fill(is_hidden, float("-inf")).softmax(-1)


@contextmanager
def observed_attention(text: TextModel, callback: Callable[[LayerAttention], None]) -> Iterator[None]:
    """Call ``callback`` for every layer of forward passes of the text model inside the context."""
    text_config = text.config
    numbers = {text.layers[number].self_attn: number for number in text.attending_layers}
    inner_name, name = text_config._attn_implementation, f"autotune_observed_attention_{id(text_config)}"
    inner, thread = ALL_ATTENTION_FUNCTIONS.get(inner_name), threading.get_ident()

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if module in numbers and threading.get_ident() == thread:  # others may run the user's model meanwhile
            layer = numbers[module]
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            window = text.layer_windows[layer]
            callback(LayerAttention(layer, query, key, scaling, kwargs.get("softcap"), window))
        # Eager attention is a function in the model's module, not in the table.
        kernel: Any = inner or sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
        return kernel(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]

    ALL_ATTENTION_FUNCTIONS[name] = attend
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[inner_name])
    try:
        with attention_function(text_config, name):
            yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]  # it refers to the model, and so would keep it in memory
        del AttentionMaskInterface._global_mapping[name]


def visual_scores(
    ranking: VisualRanking, tokens: Tensor, is_visual: Tensor, attention: LayerAttention | None = None, row: int = 0
) -> Tensor:
    """Scores of a prompt's visual tokens, [visual tokens]; a draft keeps the tokens with the highest scores.

    ``text_after_image`` takes the queries after the last visual token, because earlier ones do not see all visual
    tokens; if an image ends the prompt, its last token is the query. ``all_queries`` is eq. 2 of STAR: the mean of
    causal attention weights over heads and all queries. ``even`` and ``random`` need no attention; ``random`` is seeded
    by the prompt's tokens.

    Args:
        tokens: the prompt, [n].
        is_visual: whether each token is visual, bool [n].
        attention: of the target's last layer with attention, whose first n tokens are the prompt.
        row: the prompt's row of the batch.
    """
    visual, n = is_visual.nonzero().squeeze(1), len(tokens)
    if ranking == "even":
        return torch.from_numpy(even_scores(len(visual))).to(is_visual.device)
    if ranking == "random":
        seed = tokens.cpu().numpy().astype(np.uint32)
        return torch.from_numpy(np.random.default_rng(seed).random(len(visual), np.float32)).to(is_visual.device)
    assert attention is not None, f"{ranking} ranks by attention"
    first = {"text_after_image": min(int(visual[-1]) + 1, n - 1), "all_queries": 0, "last_query": n - 1}[ranking]
    received = attention.mean_weights(row, torch.arange(first, n, device=attention.query.device))
    return received[visual.to(received.device)]


def even_scores(count: int) -> np.ndarray:
    """Scores of which the k highest are spread over ``count`` tokens about evenly for every k, float32 [count]: tokens
    in the order in which multiples of the golden ratio, modulo 1, reach them. These do not align with the rows of an
    image, as equal steps may.
    """
    reached = (np.arange(1, 4 * count + 1) * GOLDEN_RATIO % 1.0 * count).astype(np.int64)  # every token, by three gaps
    return -np.unique(reached, return_index=True)[1].astype(np.float32)


def attention_entropy(attention: LayerAttention, row: int, queries: Tensor) -> Tensor:
    """Attention entropy (AE) of a layer in nats, averaged over heads and some queries, a scalar (DREAM, section 3.2;
    STAR, section 3.2).
    """
    weights = attention.weights(row, queries)
    return torch.special.entr(weights).sum(-1).mean()


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

    def prefill(self, prompt: EncodedPrompt, visual_rankings: Sequence[VisualRanking] = ()) -> Prefilled:
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
            logits = self.prefill_prompt(prompt, in_one_pass=True, rankings=rankings)
        assert scores, "the last layer with attention did not use the attention interface"
        if self.ranks is not None:  # each process has seen as many heads
            scores = {ranking: self.ranks.mean(of_ranking) for ranking, of_ranking in scores.items()}
        return Prefilled(prompt, logits, scores)
