"""Blocks of trained drafts, with attention and MLP in parallel.

The latency of a small draft depends on its number of kernels, not on its arithmetic. A block therefore has one norm,
one matrix product for queries, keys, values and the MLP's input, and one back to the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.modeling.grouped_attention import grouped_attention
from autotune.modeling.tree_attention import attend

MAX_BLOCKS = 4


def rotation(positions: Tensor, head_size: int, theta: float) -> Tensor:
    """Rotary factors of tokens at ``positions`` [..., n] for their (query, key, value): complex, [..., n, 3, 1, head
    size / 2]. The factors of values are 1.
    """
    frequencies = theta ** (-torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size)
    angles = positions.unsqueeze(-1).float() * frequencies
    angles = torch.stack([angles, angles, torch.zeros_like(angles)], -2).unsqueeze(-2)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(states: Tensor, factors: Tensor) -> Tensor:
    """Rotate pairs of adjacent elements in the last dimension of ``states`` [..., 3, heads, head size] by
    ``factors``.
    """
    pairs = torch.view_as_complex(states.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2).to(states.dtype)


class KeysValues(Protocol):
    """The keys and values that one block has computed before."""

    def write(self, keys_values: Tensor, begin: int | Tensor) -> tuple[Tensor, Tensor]:
        """Add those of n tokens, [batch, heads, 2, n, head size]; returns the keys and the values that the tokens
        attend to, [batch, heads, KV length, head size] each.
        """


class BlockCache:
    """Keys and values of one block, [heads, 2, capacity, head size]. The caller keeps count of the committed tokens."""

    def __init__(
        self, num_heads: int, head_size: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slab = torch.zeros(num_heads, 2, capacity, head_size, dtype=dtype, device=device)

    def write(self, keys_values: Tensor, begin: int | Tensor) -> tuple[Tensor, Tensor]:
        """Write ``keys_values`` [1, heads, 2, n, head size] from index ``begin``, or at KV slots; see
        ``KeysValues``.
        """
        (keys_values,) = keys_values
        if isinstance(begin, Tensor):
            self.slab.index_copy_(2, begin, keys_values)
            end = self.slab.shape[2]
        else:
            end = begin + keys_values.shape[2]
            self.slab.narrow(2, begin, keys_values.shape[2]).copy_(keys_values)
        keys, values = self.slab.narrow(2, 0, end).unsqueeze(0).unbind(2)
        return keys, values


class FeatureCache:
    """Keys and values of all blocks. ``length`` counts committed tokens only: nodes are evaluated with the draft's own
    features, and evaluated again with the target's once they are accepted.

    A cross-attention block also holds the tokens of the prompt that were pruned: its slot of a token is that of the
    other blocks plus their number. All blocks have the capacity of a prompt without pruning.
    """

    def __init__(self, blocks: list[BlockCache], capacity: int) -> None:
        self.blocks, self.capacity, self.length = blocks, capacity, 0

    @property
    def memory_bytes(self) -> int:
        return sum(block.slab.numel() * block.slab.element_size() for block in self.blocks)

    def clear(self) -> None:
        """Drop all tokens; the memory is kept for the next request."""
        self.length = 0

    def release(self) -> None:
        """Free the memory. The cache holds no tokens from here on."""
        self.length = self.capacity = 0
        self.blocks.clear()


class Crossing(NamedTuple):
    """Input of a cross-attention block: features of more tokens than its stream has, because visual tokens are pruned
    from the stream only (DREAM, section 3.1; STAR, section 3.1).
    """

    mask: Tensor | None = None  # as in ``AttentionContext``, with a column for every feature
    begin: int | Tensor = 0  # where new keys and values are written to the block's cache
    features: Tensor | None = None  # normalized features [batch, m, hidden]; None: those of the stream's tokens
    factors: Tensor | None = None  # their rotary factors, [batch or 1, m, 3, 1, head size / 2]


class AttentionContext(NamedTuple):
    """The keys that a forward pass of n tokens attends to; by default causal attention among the n tokens."""

    mask: Tensor | None = None
    """Additive or bool, [batch or 1, 1, n, keys], or packed, [1, 1, 1 + n, 1 + words]; None: causal."""
    caches: Sequence[KeysValues | None] = (None,) * MAX_BLOCKS
    """Earlier keys and values of each block."""
    begin: int | Tensor = 0  # where new keys and values are written to the caches
    crossing: Crossing | None = None
    """The features that cross-attention blocks attend to; None: the features of the n tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention output [batch, n, heads, head size] from inputs [batch, heads, tokens, head size]."""
        mask = self.mask
        if mask is not None and mask.dtype == torch.int64:
            return attend(query[0], key[0], value[0], mask[0, 0], query.shape[-1] ** -0.5)[None]  # type: ignore[no-any-return]
        is_causal = mask is None and isinstance(self.begin, int) and self.begin == 0 and query.shape[2] > 1
        return grouped_attention(query, key, value, mask, is_causal=is_causal).transpose(1, 2)


WITHIN_BATCH = AttentionContext()


class DraftBlock(nn.Module):
    """Attention and a gated MLP in parallel.

    Args:
        hidden_size: width of the residual stream, the target's hidden size.
        head_size: even, for rotary positions.
        has_cross_attention: project keys and values from features of the target.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_size: int, mlp_size: int, *, has_cross_attention: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.mlp_size = mlp_size
        self.has_cross_attention = has_cross_attention
        width = num_heads * head_size
        self.norm = nn.LayerNorm(hidden_size, bias=False)
        self.from_stream = nn.Linear(hidden_size, (1 if has_cross_attention else 3) * width + 2 * mlp_size, bias=False)
        self.from_features = nn.Linear(hidden_size, 2 * width, bias=False) if has_cross_attention else None
        self.to_stream = nn.Linear(width + mlp_size, hidden_size, bias=False)

    def forward(
        self,
        stream: Tensor,
        features: Tensor | None,
        factors: Tensor,
        context: AttentionContext,
        *,
        cache: KeysValues | None = None,
        head_mask: Tensor | None = None,
    ) -> Tensor:
        """The stream [batch, n, hidden] after this block.

        Args:
            features: normalized target features [batch, n, hidden], for a cross-attention block.
            factors: rotary factors from ``rotation``, [batch or 1, n, 3, 1, head size / 2].
            cache: the block's cache among those of the context.
            head_mask: 0 masks a head, [heads] or [batch, 1, heads].
        """
        # Functions, and ``forward`` of modules, because calling a module costs as much as a small kernel.
        heads, size, mlp = self.num_heads, self.head_size, self.mlp_size
        normed = functional.layer_norm(stream, self.norm.normalized_shape, self.norm.weight)
        projected = self.from_stream.forward(normed)
        attended, gate, up = projected.split((projected.shape[-1] - 2 * mlp, mlp, mlp), -1)
        crossing = context.crossing if self.has_cross_attention else None
        if crossing is not None:
            context = context._replace(mask=crossing.mask, begin=crossing.begin)
        if crossing is not None and crossing.features is not None:
            assert self.from_features is not None and crossing.factors is not None
            query = rotate(attended.unflatten(-1, (1, heads, size)), factors[..., :1, :, :]).transpose(1, 3)[:, :, 0]
            crossed = self.from_features.forward(crossing.features).unflatten(-1, (2, heads, size))
            keys_values = rotate(crossed, crossing.factors[..., 1:, :, :]).transpose(1, 3)
        else:
            if self.from_features is not None:
                assert features is not None
                attended = torch.cat([attended, self.from_features.forward(features)], -1)
            rotated = rotate(attended.unflatten(-1, (3, heads, size)), factors).transpose(1, 3)
            # [batch, heads, (query, key, value), n, head size]
            query, keys_values = rotated[:, :, 0], rotated[:, :, 1:]
        key, value = keys_values.unbind(2) if cache is None else cache.write(keys_values, context.begin)
        output = context.attend(query, key, value)
        if head_mask is not None:
            output = output * head_mask[..., None]
        both = torch.cat([output.flatten(2), functional.silu(gate) * up], -1)
        return stream + self.to_stream.forward(both)

    def head_importance(self) -> Tensor:
        """Sum of |gradient x weight| over the queries, keys and values of each head, [heads] (STAR, eq. 1)."""
        width = self.num_heads * self.head_size
        total = torch.zeros(self.num_heads, device=self.norm.weight.device)
        for linear, number in ((self.from_stream, 1 if self.has_cross_attention else 3), (self.from_features, 2)):
            if linear is not None and linear.weight.grad is not None:
                product = (linear.weight.grad * linear.weight.detach()).abs()[: number * width]
                total += product.reshape(number, self.num_heads, -1).sum((0, 2))
        return total

    def sliced(self, heads: Tensor) -> DraftBlock:
        """A copy with only some heads, in smaller matrices."""
        size, width = self.head_size, self.num_heads * self.head_size
        rows = (heads[:, None] * size + torch.arange(size, device=heads.device)).flatten()

        def select(linear: nn.Linear, number: int) -> Tensor:
            groups = torch.cat([rows + group * width for group in range(number)])
            others = torch.arange(number * width, linear.out_features, device=rows.device)
            return linear.weight.detach()[torch.cat([groups, others])].clone()

        hidden = self.norm.weight.shape[0]
        block = DraftBlock(hidden, len(heads), size, self.mlp_size, has_cross_attention=self.has_cross_attention).to(
            self.norm.weight
        )
        with torch.no_grad():
            block.norm.weight.copy_(self.norm.weight)
            block.from_stream.weight.copy_(select(self.from_stream, 1 if self.has_cross_attention else 3))
            if self.from_features is not None and block.from_features is not None:
                block.from_features.weight.copy_(select(self.from_features, 2))
            columns = torch.cat([rows, torch.arange(width, self.to_stream.in_features, device=rows.device)])
            block.to_stream.weight.copy_(self.to_stream.weight[:, columns])
        return block
