"""``flex_attention`` in tensor operations, for tests: compiling the real one takes 10 to 30 s for each shape on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: BlockMask,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Any = None,
) -> Tensor:
    """Sees the keys of the listed blocks alone, as kernels do, without reading a value on the host."""
    assert block_mask.full_kv_indices is None, "all blocks are masked ones"
    assert block_mask.shape[2:] == (query.shape[2], key.shape[2])
    assert enable_gqa or query.shape[1] == key.shape[1]
    rows, slots = (torch.arange(tensor.shape[2], device=query.device) for tensor in (query, key))
    visible = block_mask.mask_mod(rows, rows, rows[:, None], slots) & is_listed(block_mask)
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=enable_gqa)


def is_listed(block_mask: BlockMask) -> Tensor:
    """Whether a key is in a block that is read for a query, [queries, keys]."""
    num_queries, num_keys = block_mask.shape[2:]
    (counts,), (indices,) = block_mask.kv_num_blocks[0], block_mask.kv_indices[0]  # by block of queries
    is_used = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    listed = torch.zeros_like(indices).scatter_reduce(1, indices.long(), is_used.int(), "amax")
    query_size, key_size = block_mask.BLOCK_SIZE
    queries = torch.arange(num_queries, device=indices.device) // query_size
    keys = torch.arange(num_keys, device=indices.device) // key_size
    return listed[queries][:, keys] > 0
