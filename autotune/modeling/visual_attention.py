"""What the target attends to, without making the model eager.

transformers dispatches attention by a name in the text config. For the length of one forward that name is ours: every
layer still runs the kernel it had, and whoever watches is shown queries and keys. Only the rows of attention that are
asked for are computed, never the full matrix.
"""

from __future__ import annotations

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

_NAME = "autotune_watched_attention"


@dataclass(frozen=True)
class LayerAttention:
    """A layer about to attend in a forward of whole prompts behind an empty cache. query [batch, heads, n, d], key
    [batch, kv heads, n, d].
    """

    layer: int
    query: Tensor
    key: Tensor
    scaling: float
    softcap: float | None
    window: int | None

    def weights(self, row: int, queries: Tensor) -> Tensor:
        """Attention of some tokens of a batch row to those up to them, [heads, queries, n]. What is behind a token's
        window gets nothing of it.
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
def watched_attention(text: TextModel, watch: Callable[[LayerAttention], None]) -> Iterator[None]:
    """Inside, ``watch`` is called in every layer of a forward of the text model."""
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
            watch(LayerAttention(layer, query, key, scaling, kwargs.get("softcap"), window))
        if inner is None:  # "eager" is a function of the model's own file, not in the table
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
    import sys

    return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]


def visual_scores(attention: LayerAttention, row: int, is_visual: Tensor, num_tokens: int) -> Tensor:
    """Mean over heads and text queries of the attention to each visual token, [visual tokens] (STAR, eq. 2).

    Queries before the last visual token see only some of them, so those after it are asked, up to the prompt's end.

    Args:
        is_visual: of the prompt's tokens, bool [at least num_tokens].
        num_tokens: of the prompt.
    """
    offsets = is_visual[:num_tokens].nonzero().squeeze(1)
    first = min(int(offsets[-1]) + 1, num_tokens - 1)  # an image that ends the prompt: ask its last token
    queries = torch.arange(first, num_tokens, device=attention.query.device)
    return attention.weights(row, queries).mean((0, 1))[offsets.to(attention.query.device)]


def attention_entropy(attention: LayerAttention, row: int, queries: Tensor) -> Tensor:
    """Mean entropy of the attention of some tokens, in nats, over heads: AE of a layer (DREAM, section 3.2; STAR, section
    3.2), a scalar.
    """
    weights = attention.weights(row, queries)
    return torch.special.entr(weights).sum(-1).mean()
