"""Attention to a tree after a prefix whose length is in a buffer, with torch's ``flex_attention``.

A captured forward pass with additive masks attends to a padded KV length, and there is one capture for each of these lengths.
Here it attends to the whole cache under a *block mask*. The number of its blocks of keys that a kernel reads is computed on the
device from the KV slots of the step, so that one capture serves all lengths, and only as many keys are read as there are.

Tree masks are padded to ``COLUMNS`` columns, doubled until they suffice: kernels are compiled for a number of rows and columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from autotune.errors import UserError

Mask = Tensor | BlockMask
BLOCK = 128  # keys, and queries, of a block; cache capacities are multiples of it
COLUMNS = 256
TREE_MASK, PREFIX, ROW_OFFSETS, COLUMN_OFFSETS = "tree_mask", "prefix", "row_offsets", "column_offsets"
"""Inputs of a forward pass over buffers, in place of its masks: an additive mask [n, columns], the length of the prefix [], and,
for layers with a window, the offsets of the rows [n] and of the columns [columns] (see ``step.py``).
"""


def padded_columns(num_columns: int) -> int:
    """Columns of a tree mask, padded to ``COLUMNS``, doubled until they suffice."""
    columns = COLUMNS
    while columns < num_columns:
        columns *= 2
    return columns


def block_mask(
    tree_mask: Tensor,
    prefix: Tensor,
    slots: Tensor,
    *,
    capacity: int,
    window: int | None = None,
    row_offsets: Tensor | None = None,
    column_offsets: Tensor | None = None,
) -> BlockMask:
    """The mask of ``masks.padded_masks`` over a whole cache, for one layer type.

    All of its blocks are masked ones. flex_attention also takes a list of *full* blocks, to which it applies no mask, but its kernel
    for few queries then divides the cache's capacity over the GPU, not the blocks that are read (torch 2.13, template
    ``flex_decode``; pytorch pull request 143270): with a short prefix in a large cache, a few multiprocessors would do all the work.

    Args:
        tree_mask: additive, [n, columns]; its padding is hidden.
        prefix: number of tokens before the first column, [].
        slots: KV slots of the n tokens, ascending. No key after the last one is read.
        capacity: of the cache.
        window: as in ``MaskBuffer``; it needs the offsets.
    """
    num_rows, num_columns = tree_mask.shape
    # Tensors that the function below uses must be inputs of the forward pass: on a CPU, torch's compiler refuses others.

    def is_visible(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        offset = slot - prefix
        column = offset.clamp(0, num_columns - 1)
        visible = (offset < 0) | ((offset < num_columns) & (tree_mask[row, column] >= 0))
        if window is not None:
            assert row_offsets is not None and column_offsets is not None
            offset = torch.where(offset < 0, offset, column_offsets[column])
            visible = visible & (offset > row_offsets[row] - window)
        return visible

    first = torch.zeros_like(prefix)
    if window is not None:
        assert row_offsets is not None
        first = (prefix + (row_offsets.min() - window + 1).clamp(max=0)).clamp(min=0) // BLOCK
    num_blocks = capacity // BLOCK
    indices = (first + torch.arange(num_blocks, device=slots.device)).clamp(max=num_blocks - 1)
    count = slots[-1] // BLOCK + 1 - first
    shape = 1, 1, -(-num_rows // BLOCK)
    return BlockMask.from_kv_blocks(
        count.int().expand(shape).contiguous(),
        indices.int().expand(*shape, num_blocks).contiguous(),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=is_visible,
        seq_lengths=(num_rows, capacity),
        compute_q_blocks=False,  # for gradients
    )


def block_masks(
    inputs: Mapping[str, Tensor], slots: Tensor, windows: Mapping[str, int | None], *, capacity: int
) -> dict[str, BlockMask]:
    """Block masks by layer type, from the inputs of a forward pass over buffers."""
    return {
        layer_type: block_mask(
            inputs[TREE_MASK],
            inputs[PREFIX],
            slots,
            capacity=capacity,
            window=window,
            row_offsets=inputs.get(ROW_OFFSETS),
            column_offsets=inputs.get(COLUMN_OFFSETS),
        )
        for layer_type, window in windows.items()
    }


def mask_inputs(
    windows: Mapping[str, int | None],
    tree_mask: Tensor,
    prefix: Tensor,
    row_offsets: Tensor,
    column_offsets: Tensor,
    *,
    mask_value: float,
) -> dict[str, Tensor]:
    """The inputs of a forward pass over buffers, padded, from those of a step."""
    padding = padded_columns(tree_mask.shape[1]) - tree_mask.shape[1]
    inputs = {TREE_MASK: pad(tree_mask, (0, padding), value=mask_value), PREFIX: prefix}
    if any(window is not None for window in windows.values()):
        inputs |= {ROW_OFFSETS: row_offsets, COLUMN_OFFSETS: pad(column_offsets, (0, padding))}
    return inputs


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, *, scale: float | None = None) -> Tensor:
    """Attention output [1, heads, n, head size] under a block mask; other arguments as in ``grouped_attention``.

    Forward passes that are compiled contain the operator; on a GPU others call a kernel that is compiled for their shapes. On a CPU
    others compute the same without flex_attention, which would trace itself anew in every call.
    """
    is_grouped = query.shape[1] != key.shape[1]
    if torch.compiler.is_compiling():
        return _flex(query, key, value, mask, scale)
    if query.is_cuda:
        tensors = tuple((tensor.shape, tensor.stride()) for tensor in (query, key, value))
        try:
            return _compiled((*tensors, query.dtype, query.device))(query, key, value, mask, scale)
        except torch._dynamo.exc.TorchDynamoException as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise UserError(
                f"flex_attention cannot be compiled for {query.shape[2]} queries of {query.shape[1]} heads of {query.shape[3]}, "
                f"{key.shape[1]} KV heads ({lines[0] if lines else type(error).__name__}); choose a mode without -flex"
            ) from error
    rows, slots = (torch.arange(tensor.shape[2], device=query.device) for tensor in (query, key))
    visible = mask.mask_mod(rows, rows, rows[:, None], slots)  # it reads neither batch nor head
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=is_grouped)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    groups, options = query.shape[1] // key.shape[1], None
    if query.is_cuda and query.shape[2] < BLOCK and groups & (groups - 1) == 0:
        # The kernel for few queries takes the queries of a group as rows of one tile. By default it takes all of them, and is left
        # without a configuration where they are more than a block (pytorch pull request 185349, which is not in torch 2.13).
        rows = 1 << (query.shape[2] * groups - 1).bit_length()
        options = {"BLOCK_M": min(BLOCK, max(16, rows))}
    out = flex_attention(
        query,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=groups > 1,
        kernel_options=options,  # type: ignore[arg-type]
    )
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _compiled(shapes: object) -> Callable[..., Tensor]:
    """``_flex``, compiled. It has a code object of its own for all tensors of these shapes, because torch stops compiling one code
    object after a few shapes; layers with different windows share it.
    """
    function = FunctionType(_flex.__code__.replace(), _flex.__globals__)
    return torch.compile(function, dynamic=False, fullgraph=True)


def refuse_changed_scores(arguments: Mapping[str, Any]) -> None:
    """Check the further arguments of an attention function of transformers.

    Raises:
        UserError: one of them changes the scores.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if arguments.get(name) is not None:
            raise UserError(
                f"a mode with -flex cannot run attention with {name}, as this model has; choose one without -flex"
            )
