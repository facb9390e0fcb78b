"""The Triton kernels of ``tree_attention.attend``.

The keys are split, so that many multiprocessors work for one request: the prefix into parts of fixed size, and the
columns after it, the tree, as one more part. Only the tree has a mask of bits. Each part keeps a running softmax
(FlashAttention), and a second kernel merges the parts by the logarithms of their sums, as Flash-Decoding does. The
lengths are read from the packed mask on the device: one compiled kernel and one CUDA graph serve all of them.

The rows of a block are the query heads of one KV head, token by token, so that keys and values are read once for all
of them, whatever their number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 1 << 14
"""Keys, or values, that a block reads at once: two buffers of both fit the shared memory of any device."""


@triton.jit
def _add_keys(
    query,
    keys,
    values,
    key_slot_stride,
    value_slot_stride,
    slot,
    dim,
    is_key,
    is_dim,
    is_visible,
    scale,
    softcap,
    best,
    total,
    out,
    HAS_SOFTCAP: tl.constexpr,
):
    """Add a tile of keys to a running softmax: the largest score of each row, the sum, and the weighted values."""
    mask = is_key[:, None] & is_dim[None, :]
    key = tl.load(keys + slot[:, None] * key_slot_stride + dim[None, :], mask=mask, other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)  # the hyperbolic tangent
    score = tl.where(is_visible, score, float("-inf"))
    new_best = tl.maximum(best, tl.max(score, 1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp(score - safe[:, None])
    old = tl.exp(best - safe)
    value = tl.load(values + slot[:, None] * value_slot_stride + dim[None, :], mask=mask, other=0.0)
    out = out * old[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return new_best, total * old + tl.sum(weight, 1), out


@triton.jit(do_not_specialize=["num_rows"])
def _attend_part(
    query,
    keys,
    values,
    mask,
    part_out,
    part_lse,
    scale,
    softcap,
    query_head_stride,
    query_token_stride,
    key_head_stride,
    key_slot_stride,
    value_head_stride,
    value_slot_stride,
    mask_stride,
    num_rows,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attention of a block of rows to one part of the keys: part 0 is the tree, the others are of the prefix."""
    kv_head, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_columns = tl.load(mask).to(tl.int32) + num_rows // GROUPS
    prefix = tl.load(mask + 1).to(tl.int32)
    begin = (part - 1) * SPLIT
    if begin >= prefix:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    token = row // GROUPS
    head = kv_head * GROUPS + row % GROUPS
    is_row, is_dim = row < num_rows, dim < SIZE
    at_query = head[:, None] * query_head_stride + token[:, None] * query_token_stride + dim[None, :]
    rows = tl.load(query + at_query, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    mask_row = mask + (1 + token) * mask_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIMS], tl.float32)
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    if part > 0:
        first = tl.load(mask_row, mask=is_row, other=2147483647).to(tl.int32)
        lowest = tl.maximum(begin, tl.min(first, 0))
        for start in range(lowest, tl.minimum(begin + SPLIT, prefix), TILE):
            slot = start + tl.arange(0, TILE)
            is_key = slot < tl.minimum(begin + SPLIT, prefix)
            is_visible = is_key[None, :] & (slot[None, :] >= first[:, None])
            best, total, out = _add_keys(
                rows,
                keys,
                values,
                key_slot_stride,
                value_slot_stride,
                slot,
                dim,
                is_key,
                is_dim,
                is_visible,
                scale,
                softcap,
                best,
                total,
                out,
                HAS_SOFTCAP,
            )
    else:
        words = (mask_row + 1).to(tl.pointer_type(tl.int32))
        for start in range(0, num_columns, 32):
            column = start + tl.arange(0, 32)
            word = tl.load(words + start // 32, mask=is_row, other=0)
            is_key = column < num_columns
            is_visible = is_key[None, :] & (((word[:, None] >> tl.arange(0, 32)[None, :]) & 1) > 0)
            best, total, out = _add_keys(
                rows,
                keys,
                values,
                key_slot_stride,
                value_slot_stride,
                prefix + column,
                dim,
                is_key,
                is_dim,
                is_visible,
                scale,
                softcap,
                best,
                total,
                out,
                HAS_SOFTCAP,
            )
    at = (part * tl.num_programs(0) + kv_head) * num_rows + row
    lse = tl.where(total > 0, best + tl.log(tl.maximum(total, 1e-30)), float("-inf"))
    tl.store(part_lse + at, lse, mask=is_row)
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(part_out + at[:, None] * SIZE + dim[None, :], out, mask=is_row[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _merge_parts(
    part_out,
    part_lse,
    mask,
    sinks,
    result,
    num_rows,
    num_kv_heads,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The result of one row, from all parts."""
    kv_head, row = tl.program_id(0), tl.program_id(1)
    head = kv_head * GROUPS + row % GROUPS
    num_parts = 1 + tl.cdiv(tl.load(mask + 1).to(tl.int32), SPLIT)
    dim = tl.arange(0, DIMS)
    best, total = float("-inf"), 0.0
    if HAS_SINKS:
        best, total = tl.load(sinks + head).to(tl.float32), 1.0
    out = tl.zeros([DIMS], tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = (part * num_kv_heads + kv_head) * num_rows + row
        lse = tl.load(part_lse + at, mask=part < num_parts, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(lse, 0))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp(lse - safe)
        old = tl.exp(best - safe)
        is_read = (weight > 0)[:, None] & (dim < SIZE)[None, :]
        outs = tl.load(part_out + at[:, None] * SIZE + dim[None, :], mask=is_read, other=0.0)
        best, total = new_best, total * old + tl.sum(weight, 0)
        out = out * old + tl.sum(weight[:, None] * outs, 0)
    out = out / tl.where(total > 0, total, 1.0)
    at = ((row // GROUPS) * num_kv_heads * GROUPS + head) * SIZE + dim
    tl.store(result + at, out.to(result.dtype.element_ty), mask=dim < SIZE)


def variant(num_rows: int, size: int, capacity: int, item_bytes: int) -> dict[str, int]:
    """The constants for which the kernel of a part is compiled, from the rows of a KV head, the head size and the
    capacity of the cache.
    """
    dims = max(16, triton.next_power_of_2(size))
    return {
        "DIMS": dims,
        "ROWS": max(16, min(64, triton.next_power_of_2(num_rows))),
        "TILE": max(16, min(64, TILE_BYTES // (dims * item_bytes))),
        "SPLIT": max(128 if num_rows <= 64 else 512, triton.next_power_of_2(capacity) // 64),
    }


def launch_options(chosen: dict[str, int]) -> dict[str, int]:
    """Warps of a block, and tiles that it loads ahead. Eight warps on 32 rows of 256 numbers spill registers on the
    architectures 10.0 and 12.0.
    """
    return {"num_warps": 8 if chosen["ROWS"] == 64 and chosen["DIMS"] >= 128 else 4, "num_stages": 2}


def attend_in_splits(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """See ``tree_attention.attend``. The last dimension of each tensor is contiguous."""
    heads, n, size = query.shape
    kv_heads, capacity, _ = keys.shape
    groups, num_rows = heads // kv_heads, n * heads // kv_heads
    chosen = variant(num_rows, size, capacity, query.element_size())
    num_parts = 1 + triton.cdiv(capacity, chosen["SPLIT"])
    part_out = query.new_empty(num_parts, kv_heads, num_rows, size, dtype=torch.float32)
    part_lse = query.new_empty(num_parts, kv_heads, num_rows, dtype=torch.float32)
    result = query.new_empty(n, heads, size)
    _attend_part[kv_heads, triton.cdiv(num_rows, chosen["ROWS"]), num_parts](
        query,
        keys,
        values,
        mask,
        part_out,
        part_lse,
        scale,
        softcap,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        mask.stride(0),
        num_rows,
        GROUPS=groups,
        SIZE=size,
        **chosen,
        HAS_SOFTCAP=softcap > 0.0,
        **launch_options(chosen),
    )
    _merge_parts[kv_heads, num_rows](
        part_out,
        part_lse,
        mask,
        part_lse if sinks is None else sinks,
        result,
        num_rows,
        kv_heads,
        GROUPS=groups,
        SIZE=size,
        DIMS=chosen["DIMS"],
        PARTS=16,
        SPLIT=chosen["SPLIT"],
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )
    return result
