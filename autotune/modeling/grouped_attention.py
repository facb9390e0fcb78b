"""Attention of grouped queries that does not copy keys and values.

Several query heads share one KV head. With a mask, transformers repeats keys and values for every query head before it
calls ``scaled_dot_product_attention``, in every layer and step. Here the KV heads become the batch, and their keys and
values are broadcast to the query heads with a stride of 0, which every kernel reads without a copy. The result is the
same bit for bit on a CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from autotune.modeling.attention import attention_function

_NAME = "autotune_grouped_sdpa"


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention output [batch, heads, n, head size].

    Args:
        query: [batch, heads, n, head size].
        key, value: [batch, KV heads, m, head size]; query head h reads KV head h // (heads / KV heads).
        mask: additive, broadcast to [batch, heads, n, m].
        scale: factor of the products; None: 1 / sqrt(head size).
    """
    batch, num_heads, n, _ = query.shape
    groups = num_heads // key.shape[1]
    has_one_mask = mask is None or mask.shape[1] == 1
    if groups > 1 and n == 1 and batch > 1 and has_one_mask:  # the query heads of a KV head become its rows
        mask = None if mask is None else mask.expand(-1, 1, groups, -1)
        rows = query.reshape(batch, -1, groups, query.shape[-1])
        out = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
        return out.reshape(query.shape[:3] + out.shape[-1:])
    if groups == 1 or batch > 1 or not has_one_mask:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups > 1
        )
    out = functional.scaled_dot_product_attention(
        query[0].unflatten(0, (-1, groups)),
        key.transpose(0, 1).expand(-1, groups, -1, -1),
        value.transpose(0, 1).expand(-1, groups, -1, -1),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
    )
    return out.reshape(1, num_heads, n, -1)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """``sdpa`` as transformers calls it, by these names or in this order; what is not a masked step of grouped queries
    is left to transformers.
    """
    is_plain = attention_mask is None or query.shape[1] == key.shape[1] or kwargs.get("softcap") is not None
    if is_plain or kwargs.get("position_bias") is not None or kwargs.get("dropout"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    out = grouped_attention(query, key, value, attention_mask, scale=kwargs.get("scaling"))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attention_of_steps(config: Any) -> AbstractContextManager[None]:
    """Within the context, a text model with this config and ``sdpa`` attention does not copy keys and values."""
    return attention_function(config, _NAME) if config._attn_implementation == "sdpa" else nullcontext()
