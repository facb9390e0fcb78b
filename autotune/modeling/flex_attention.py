"""Attention to a tree after a prefix whose length is in a buffer, with torch's ``flex_attention``.

A captured forward pass with additive masks attends to a padded KV length, and there is one capture for each of these lengths.
Here it attends to the whole cache under a *block mask*. The number of blocks of keys that a kernel reads is computed on the device
from the KV slots of the step, so that one capture serves all lengths, and no blocks are read after the last token.

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


class TreeBlockMask(BlockMask):
    """The block mask of a step for one layer type, of a tree after a prefix. It shows what ``masks.padded_masks`` show.

    All of its blocks are masked ones. flex_attention also takes a list of *full* blocks, to which it applies no mask, but its kernel
    for few queries then divides the cache's capacity over the GPU, not the blocks that are read (torch 2.13, template
    ``flex_decode``; pytorch pull request 143270): with a short prefix in a large cache, a few multiprocessors would do all the work.

    Args:
        tree_mask: additive, [n, columns]; its padding is hidden.
        prefix: number of tokens before the first column, [].
        num_blocks: blocks of keys that are read, [].
        first_block: the first of them, [].
        capacity: of the cache, in tokens.
        window: as in ``MaskBuffer``; it needs the offsets.
    """

    def __init__(
        self,
        tree_mask: Tensor,
        prefix: Tensor,
        num_blocks: Tensor,
        first_block: Tensor,
        *,
        capacity: int,
        window: int | None = None,
        row_offsets: Tensor | None = None,
        column_offsets: Tensor | None = None,
    ) -> None:
        self.tree_mask, self.prefix, self.num_blocks, self.first_block = tree_mask, prefix, num_blocks, first_block
        self.window, self.row_offsets, self.column_offsets = window, row_offsets, column_offsets
        num_rows, num_columns = tree_mask.shape

        def is_visible(batch: Tensor, head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            offset = slot - prefix
            column = offset.clamp(0, num_columns - 1)
            visible = (offset < 0) | ((offset < num_columns) & (tree_mask[row, column] >= 0))
            if window is not None:
                assert row_offsets is not None and column_offsets is not None
                offset = torch.where(offset < 0, offset, column_offsets[column])
                visible = visible & (offset > row_offsets[row] - window)
            return visible

        blocks = torch.arange(capacity // BLOCK, device=prefix.device)
        shape = 1, 1, -(-num_rows // BLOCK)
        super().__init__(
            seq_lengths=(num_rows, capacity),
            kv_num_blocks=num_blocks.int().expand(shape).contiguous(),
            kv_indices=(first_block + blocks).clamp(max=len(blocks) - 1).int().expand(*shape, -1).contiguous(),
            full_kv_num_blocks=None,
            full_kv_indices=None,
            q_num_blocks=None,  # for gradients
            q_indices=None,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=is_visible,
        )

    def __getitem__(self, index: Any) -> TreeBlockMask:
        """The mask itself, to models that take a slice of all rows (Gemma 4)."""
        if index != (slice(None), slice(None), slice(0, None), slice(None)):
            raise NotImplementedError(f"a block mask has no part {index}")
        return self


def block_mask_of(
    tree_mask: Tensor,
    prefix: Tensor,
    slots: Tensor,
    *,
    capacity: int,
    window: int | None = None,
    row_offsets: Tensor | None = None,
    column_offsets: Tensor | None = None,
) -> TreeBlockMask:
    """The mask of n tokens that are written at ``slots`` [n], ascending. No key after the last one is read, nor one that the window
    hides from all of them. Other arguments as in ``TreeBlockMask``.
    """
    first = torch.zeros_like(prefix)
    if window is not None:
        assert row_offsets is not None
        first = (prefix + (row_offsets.min() - window + 1).clamp(max=0)).clamp(min=0) // BLOCK
    return TreeBlockMask(
        tree_mask,
        prefix,
        slots[-1] // BLOCK + 1 - first,
        first,
        capacity=capacity,
        window=window,
        row_offsets=row_offsets,
        column_offsets=column_offsets,
    )


Mask = Tensor | TreeBlockMask


def block_masks(
    inputs: Mapping[str, Tensor], slots: Tensor, windows: Mapping[str, int | None], *, capacity: int
) -> dict[str, TreeBlockMask]:
    """Masks by layer type, from the inputs of a forward pass over buffers."""
    offsets = inputs.get(ROW_OFFSETS), inputs.get(COLUMN_OFFSETS)
    return {
        layer_type: block_mask_of(
            inputs[TREE_MASK],
            inputs[PREFIX],
            slots,
            capacity=capacity,
            window=window,
            row_offsets=offsets[0],
            column_offsets=offsets[1],
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


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeBlockMask, *, scale: float | None = None
) -> Tensor:
    """Attention output [1, heads, n, head size] over a whole cache; arguments as in ``grouped_attention``.

    On a GPU, and within compiled forward passes, a kernel that is compiled for the shapes runs. Other forward passes on a CPU
    compute the same without flex_attention, which would trace itself anew in every call.
    """
    if torch.compiler.is_compiling():
        blocks = mask.num_blocks, mask.first_block
        offsets = mask.window, mask.row_offsets, mask.column_offsets
        return _opaque(query, key, value, mask.tree_mask, mask.prefix, *blocks, *offsets, scale)
    if query.is_cuda:
        return _run_kernel(query, key, value, mask, scale)
    rows, slots = (torch.arange(tensor.shape[2], device=query.device) for tensor in (query, key))
    visible = mask.mask_mod(rows, rows, rows[:, None], slots)  # it reads neither batch nor head
    is_grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=is_grouped)


@torch.library.custom_op("autotune::tree_attention", mutates_args=())
def _opaque(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree_mask: Tensor,
    prefix: Tensor,
    num_blocks: Tensor,
    first_block: Tensor,
    window: int | None,
    row_offsets: Tensor | None,
    column_offsets: Tensor | None,
    scale: float | None,
) -> Tensor:
    """As an operator that torch's compiler does not look into. Otherwise torch 2.13 loses what the compiled function writes to
    attributes after a call of flex_attention, among them the state in which transformers records hidden states.
    """
    mask = TreeBlockMask(
        tree_mask,
        prefix,
        num_blocks,
        first_block,
        capacity=key.shape[2],
        window=window,
        row_offsets=row_offsets,
        column_offsets=column_offsets,
    )
    return _run_kernel(query, key, value, mask, scale).contiguous()


@_opaque.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _run_kernel(query: Tensor, key: Tensor, value: Tensor, mask: TreeBlockMask, scale: float | None) -> Tensor:
    shapes = tuple((tensor.shape, tensor.stride()) for tensor in (query, key, value))
    try:
        return _compiled((shapes, mask.tree_mask.shape, query.dtype, query.device))(query, key, value, mask, scale)
    except torch._dynamo.exc.TorchDynamoException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"flex_attention cannot be compiled for {query.shape[2]} queries of {query.shape[1]} heads of {query.shape[3]}, "
            f"{key.shape[1]} KV heads ({lines[0] if lines else type(error).__name__}); choose a mode without -flex"
        ) from error


@functools.cache
def _compiled(shapes: object) -> Callable[..., Tensor]:
    """``_flex``, compiled. It has a code object of its own for all tensors of these shapes, because torch stops compiling one code
    object after a few shapes; layers with different windows share it.
    """
    function = FunctionType(_flex.__code__.replace(), _flex.__globals__)
    return torch.compile(function, dynamic=False, fullgraph=True)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: TreeBlockMask, scale: float | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    options: Any = None
    if not query.is_cuda:
        # In partitions as large as the cache a single query is not split over the keys: torch 2.13's CPU kernel that splits does not
        # compile without full blocks.
        options = {"PARTITION_SIZE": key.shape[2]}
    elif query.shape[2] < BLOCK and groups & (groups - 1) == 0:
        # The kernel for few queries takes the queries of a group as rows of one tile. By default it takes all of them, and is left
        # without a configuration where they are more than a block (pytorch pull request 185349, which is not in torch 2.13).
        rows = 1 << (query.shape[2] * groups - 1).bit_length()
        options = {"BLOCK_M": min(BLOCK, max(16, rows))}
    return flex_attention(  # type: ignore[return-value]
        query, key, value, block_mask=mask, scale=scale, enable_gqa=groups > 1, kernel_options=options
    )


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
