"""Observes attention weights during a forward pass without switching the model to eager attention.

transformers dispatches attention by a name in the text config. For one forward pass the config names a function of this
module, which passes each layer's queries and keys to a callback and then runs the layer's own kernel. The callback
computes the rows of attention that it needs, never the full matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autotune.modeling.text_model import TextModel

_NAME = "autotune_observed_attention"


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention in the prefill of whole prompts: query [batch, heads, n, d], key [batch, kv heads, n, d]."""

    layer: int
    query: Tensor
    key: Tensor
    scaling: float
    softcap: float | None
    window: int | None

    def weights(self, row: int, queries: Tensor) -> Tensor:
        """Attention weights of some tokens of a batch row, [heads, queries, n]. Weights outside the causal window are 0."""
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
    numbers = {layer.self_attn: number for number, layer in enumerate(text.layers)}
    inner_name = text_config._attn_implementation
    inner = ALL_ATTENTION_FUNCTIONS.get(inner_name)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if module in numbers:
            layer = numbers[module]
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            window = text.windows[text.layer_types[layer]]
            callback(LayerAttention(layer, query, key, scaling, kwargs.get("softcap"), window))
        if inner is None:  # eager attention is a function in the model's module, not in the table
            return _eager_of(module)(module, query, key, value, mask, **kwargs)
        return inner(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[inner_name])
    text_config._attn_implementation = _NAME
    try:
        yield
    finally:
        text_config._attn_implementation = inner_name


def _eager_of(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]


def visual_scores(attention: LayerAttention, row: int, is_visual: Tensor, num_tokens: int) -> Tensor:
    """Mean over heads and text queries of the attention to each visual token, [visual tokens] (STAR, eq. 2).

    The queries are the tokens after the last visual token, because earlier ones do not see all visual tokens.

    Args:
        is_visual: whether each token of the prompt is visual, bool [at least num_tokens].
        num_tokens: length of the prompt.
    """
    visual = is_visual[:num_tokens].nonzero().squeeze(1)
    first = min(int(visual[-1]) + 1, num_tokens - 1)  # if an image ends the prompt, its last token is the query
    queries = torch.arange(first, num_tokens, device=attention.query.device)
    return attention.weights(row, queries).mean((0, 1))[visual.to(attention.query.device)]


def attention_entropy(attention: LayerAttention, row: int, queries: Tensor) -> Tensor:
    """Attention entropy (AE) of a layer in nats, averaged over heads and some queries, a scalar (DREAM, section 3.2; STAR,
    section 3.2).
    """
    weights = attention.weights(row, queries)
    return torch.special.entr(weights).sum(-1).mean()
