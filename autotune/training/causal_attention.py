"""Causal attention of whole rows in blocks of queries, for training on a CPU.

On two cores of an EPYC, torch's kernel for CPUs takes two to three times as long for both passes in bfloat16. A block of
queries reads the keys up to its own end alone, so that little of what the mask hides is computed. ``torch.compile`` fuses
the softmax.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from autotune.modeling.attention import attention_function

BLOCK = 128  # queries
_NAME = "autotune_causal_blocks"


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float, block: int = BLOCK) -> Tensor:
    """Attention output [batch, heads, n, head size] of rows without padding.

    Args:
        query: [batch, heads, n, head size].
        key, value: [batch, KV heads, n, head size]; query head h reads KV head h // (heads / KV heads).
    """
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    queries = (query * scale).unflatten(1, (-1, groups))
    outputs = []
    for begin in range(0, length, block):
        end = min(begin + block, length)
        rows = queries[:, :, :, begin:end].flatten(2, 3)  # [batch, KV heads, groups * rows, head size]
        is_seen = torch.ones(end - begin, end, dtype=torch.bool, device=query.device).tril(begin).repeat(groups, 1)
        scores = (rows @ key[:, :, :end].transpose(2, 3)).float().masked_fill(~is_seen, float("-inf"))
        output = scores.softmax(-1).to(value.dtype) @ value[:, :, :end]
        outputs.append(output.unflatten(2, (groups, -1)))
    return torch.cat(outputs, 3).flatten(1, 2)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers calls it."""
    return causal_attention(query, key, value, scale=scaling).transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Rows are causal and have no padding."""


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _no_mask)


def causal_blocks(config: Any) -> AbstractContextManager[None]:
    """Within the context, a text model with this config reads rows without padding or cache by ``causal_attention``."""
    return attention_function(config, _NAME)
