"""Attention of a captured step, whose lengths are read on the device: n tokens of a tree over cached keys and values.

On CUDA devices it runs the Triton kernels of ``tree_attention_kernels.py``. Elsewhere, and where Triton is missing or
does not compile, the packed mask is unpacked and given to ``scaled_dot_product_attention``.

Layers of a transformers model call it by the name of an attention function; their masks are packed (``step.py``).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from autotune.errors import first_line
from autotune.modeling.attention import attention_function
from autotune.modeling.grouped_attention import grouped_attention
from autotune.modeling.step import WORD_BITS

LEAST_CAPABILITY = (8, 0)  # Triton has no products on the tensor cores of older devices


@torch.library.custom_op("autotune::attend", mutates_args=())
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output [n, heads, size].

    Args:
        query: [heads, n, size]; query head h reads KV head h // (heads / KV heads).
        keys, values: the whole cache, [KV heads, capacity, size] each. What lies beyond the step's tokens is not read.
        mask: packed (``step.py``), [1 + n, 1 + words].
        scale: factor of the products.
        softcap: limit of the products; 0: none.
        sinks: for each head a logit that takes part in the softmax without a value, [heads].
    """
    length = int(mask[0, :2].sum()) + query.shape[1]
    return attend_with_mask(query, keys[:, :length], values[:, :length], mask, scale, softcap, sinks)


@attend.register_fake
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[0], values.shape[2])


@attend.register_kernel("cuda")
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    # Products of float32 would not run on tensor cores: the kernels spill their registers.
    has_kernel = query.dtype != torch.float32 and keys.shape[2] == values.shape[2]
    if not has_kernel or why_no_triton(query.device) is not None:
        return attend_with_mask(query, keys, values, mask, scale, softcap, sinks)
    from autotune.modeling.tree_attention_kernels import attend_in_splits

    return attend_in_splits(query, keys, values, mask, scale, softcap, sinks)


def attend_with_mask(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """``attend`` over all keys that are given, with an additive mask."""
    length = keys.shape[1]
    additive = additive_mask(mask, length, mask_value=torch.finfo(query.dtype).min, dtype=query.dtype)
    if not softcap and sinks is None:
        out = grouped_attention(query[None], keys[None], values[None], additive, scale=scale)[0]
        return out.transpose(0, 1).contiguous()
    groups = query.shape[0] // keys.shape[0]
    scores = query.unflatten(0, (-1, groups)).float() @ keys[:, None].transpose(-1, -2).float() * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = (scores + additive[0]).flatten(0, 1)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1)[..., :length].unflatten(0, (-1, groups))
    return (weights @ values[:, None].float()).flatten(0, 1).transpose(0, 1).to(query.dtype).contiguous()


def additive_mask(mask: Tensor, length: int, *, mask_value: float, dtype: torch.dtype) -> Tensor:
    """A packed mask over the first ``length`` KV slots as an additive one, [1, 1, n, length]."""
    first_slots, words = mask[1:, :1], mask[1:, 1:]
    num_uncommitted, prefix = mask[0, :2].split(1)
    slot = torch.arange(length, device=mask.device)
    column = (slot - prefix).clamp(0, WORD_BITS * words.shape[1] - 1)
    is_set = (words[:, column // WORD_BITS] >> (column % WORD_BITS)) & 1 > 0
    is_after = (slot >= prefix) & (slot - prefix < num_uncommitted + len(words))
    is_visible = torch.where(slot < prefix, slot >= first_slots, is_set & is_after)
    return torch.zeros(is_visible.shape, dtype=dtype, device=mask.device).masked_fill_(~is_visible, mask_value)[
        None, None
    ]


@functools.cache
def why_no_triton(device: torch.device) -> str | None:
    """The reason for which a device runs ``attend`` with masks; None: it runs the kernels."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        return f"the kernels need compute capability 8.0, and the device has {capability[0]}.{capability[1]}"
    try:
        from autotune.modeling.tree_attention_kernels import attend_in_splits

        states = torch.zeros(1, 1, 64, dtype=torch.float16, device=device)
        attend_in_splits(states, states, states, torch.zeros(2, 2, dtype=torch.int64, device=device), 1.0, 0.0, None)
    except Exception as error:
        return first_line(error)
    return None


_NAME = "autotune_tree"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Calls without a packed mask, as from another thread, are those of transformers' ``sdpa``."""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale, softcap, sinks = kwargs.get("scaling"), kwargs.get("softcap"), kwargs.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return attend(query[0], key[0], value[0], attention_mask[0, 0], scale, softcap or 0.0, sinks)[None], None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def captured_attention(config: Any) -> AbstractContextManager[None]:
    """Within the context, a text model with this config takes packed masks."""
    return attention_function(config, _NAME)
