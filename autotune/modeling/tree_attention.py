"""Temporary: the reference alone."""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.modeling.grouped_attention import grouped_attention


def additive_mask(mask: Tensor, length: int, *, mask_value: float, dtype: torch.dtype) -> Tensor:
    prefix, uncommitted, n = mask[0, 1], mask[0, 0], mask.shape[0] - 1
    column = torch.arange(length, device=mask.device)
    c = (column - prefix).clamp(min=0)
    c2 = c.clamp(max=(mask.shape[1] - 1) * 64 - 1)
    bits = ((mask[1:, 1:][:, c2 // 64] >> (c2 % 64)) & 1) > 0
    seen = torch.where(column < prefix, column >= mask[1:, :1], bits & (c < uncommitted + n))
    return torch.zeros(seen.shape, dtype=dtype, device=mask.device).masked_fill_(~seen, mask_value)[None, None]


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
    length = int(mask[0, 0] + mask[0, 1]) + mask.shape[0] - 1
    add = additive_mask(mask, length, mask_value=torch.finfo(query.dtype).min, dtype=query.dtype)
    out = grouped_attention(query[None], keys[None, :, :length], values[None, :, :length], add, scale=scale)
    return out[0].transpose(0, 1).contiguous()


@attend.register_fake
def _(query, keys, values, mask, scale, softcap=0.0, sinks=None):
    return query.new_empty(query.shape[1], query.shape[0], values.shape[-1])
