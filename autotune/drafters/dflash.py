"""``dflash``: block-diffusion drafts (DFlash, arXiv 2602.06036). One forward pass proposes the tokens of a whole block.

A block is the last committed token, whose features are not known yet, and mask tokens after it. All of them attend to
each other and to the context: keys and values that every layer computes from the target's features of the committed
tokens, several layers projected together. The state of the mask at depth d gives the distribution of the d-th drafted
token, whatever the tokens between are, so that the nodes of one level have the same children.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, apply_rotary_pos_emb

from autotune.drafters.blocks import WITHIN_BATCH, AttentionContext, BlockCache, KeysValues, attend_to
from autotune.drafters.network import JoinedLayersConfig, JoinedLayersNetwork


class DFlashConfig(JoinedLayersConfig):
    """Sizes of a block-diffusion draft, besides those of its layers."""

    kind: str = "dflash"
    block_size: int = Field(ge=2, le=1024)
    """Tokens of a block, the committed one included."""
    mask_token: int = Field(ge=0)
    """The token whose embedding stands for a token to be drafted."""


class DFlashNetwork(JoinedLayersNetwork):
    """The draft, with the parameter names of its authors' checkpoints.

    Args:
        layer: sizes of the layers; their types are ``full_attention`` and ``sliding_attention``, whose window reaches
            as far ahead as back.
        draft_vocabulary_size: tokens of a vocabulary of its own, with an output head of its own; None: the target's.
    """

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, layer: Qwen3Config, *, draft_vocabulary_size: int | None = None) -> None:
        super().__init__()
        self.config, self.layer_config = config, layer
        hidden, eps = config.hidden_size, layer.rms_norm_eps
        self.embedding = self.first_feature = None
        self.fc = nn.Linear(len(config.layers) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList(DFlashLayer(layer, number) for number in range(layer.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps=eps)
        self.lm_head: nn.Linear | None = None
        self.register_buffer("d2t", None)
        if draft_vocabulary_size is not None:
            self.lm_head = nn.Linear(hidden, draft_vocabulary_size, bias=False)
            self.d2t = torch.zeros(draft_vocabulary_size, dtype=torch.long)

    @property
    def window(self) -> int | None:
        """How far sliding layers see, back and ahead, in tokens; None: there are none."""
        return next((layer.window for layer in self._blocks if layer.window is not None), None)

    @property
    def _blocks(self) -> list[DFlashLayer]:
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]

    def new_caches(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> list[BlockCache]:
        config = self.layer_config
        return [
            BlockCache(config.num_key_value_heads, config.head_dim, capacity, dtype=dtype, device=device)
            for _ in self.layers
        ]

    def target_features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The concatenated layers, projected and normalized."""
        return self.hidden_norm(super().target_features(hidden))  # type: ignore[no-any-return]

    def add_context(self, features: Tensor, factors: Tensor, context: AttentionContext) -> None:
        """Add the keys and values of committed tokens to all caches, from ``features`` [batch, m, hidden] alone."""
        for layer, cache in zip(self._blocks, context.caches, strict=True):
            assert cache is not None
            cache.write(layer.keys_values(features, factors), context.begin)

    def forward(
        self,
        stream: Tensor,
        features: Tensor,
        factors: Tensor,
        context: AttentionContext = WITHIN_BATCH,
        *,
        window_mask: Tensor | None = None,
    ) -> Tensor:
        """States [batch, n, hidden] of the n tokens of one or several blocks.

        Args:
            stream: embeddings of the n tokens.
            features: of the m committed tokens that are not in the caches yet, [batch, m, hidden]; m may be 0.
            factors: of the m and the n tokens, [batch or 1, m + n, 2, head size].
            context: the caches, and where the m and the n tokens are written. ``mask`` None: the n tokens see all keys.
            window_mask: the mask of sliding layers; None: their window reaches everything.
        """
        num_new = features.shape[1]
        before, after = _split(context.begin, num_new)
        self.add_context(features, factors[..., :num_new, :, :], context._replace(begin=before))
        full = context._replace(begin=after)
        sliding = full if window_mask is None else full._replace(mask=window_mask)
        for layer, cache in zip(self._blocks, context.caches, strict=True):
            assert cache is not None
            seen = full if layer.window is None else sliding
            stream = layer(stream, factors[..., num_new:, :, :], seen, cache)
        return self.norm(stream)  # type: ignore[no-any-return]

    def logits(self, states: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        return head(states) if self.lm_head is None else self.lm_head(states)  # type: ignore[no-any-return]


class DFlashLayer(Qwen3DecoderLayer):  # type: ignore[misc]
    """A Qwen3 layer whose attention also reads keys and values of features, which it does not update."""

    @property
    def window(self) -> int | None:
        """How far the layer sees, back and ahead, in tokens; None: everything."""
        return self.self_attn.sliding_window  # type: ignore[no-any-return]

    def keys_values(self, rows: Tensor, factors: Tensor) -> Tensor:
        """Keys and values [batch, KV heads, 2, n, head size] of ``rows`` [batch, n, hidden]."""
        attention = self.self_attn
        key, value = (
            project(rows).unflatten(-1, (-1, attention.head_dim)) for project in (attention.k_proj, attention.v_proj)
        )
        return torch.stack([_rotated(attention.k_norm(key), factors), value.transpose(1, 2)], 2)

    def forward(self, stream: Tensor, factors: Tensor, context: AttentionContext, cache: KeysValues) -> Tensor:
        """The stream [batch, n, hidden] of blocks after this layer."""
        normed, attention = self.input_layernorm(stream), self.self_attn
        query = _rotated(attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim))), factors)
        keys, values = cache.write(self.keys_values(normed, factors), context.begin)
        stream = stream + attention.o_proj(attend_to(query, keys, values, context.mask).flatten(2))
        return stream + self.mlp(self.post_attention_layernorm(stream))  # type: ignore[no-any-return]


def _rotated(heads: Tensor, factors: Tensor) -> Tensor:
    """Queries or keys [batch, n, heads, head size] at their positions, [batch, heads, n, head size]."""
    states = heads.transpose(1, 2)
    rotated, _ = apply_rotary_pos_emb(states, states[:, :0], factors[..., 0, :], factors[..., 1, :])
    return rotated  # type: ignore[no-any-return]


def _split(begin: int | Tensor, count: int) -> tuple[int | Tensor, int | Tensor]:
    """Where the first ``count`` tokens are written, and where the others are."""
    if isinstance(begin, Tensor):
        return begin[:count], begin[count:]
    return begin, begin + count


def block_embeddings(table: Any, tokens: Tensor) -> Tensor:
    """Embeddings of a block's tokens: as the target scales them, but without a norm that a target has after its
    table.
    """
    if getattr(table, "embed_norm", None) is None:
        return table(tokens)  # type: ignore[no-any-return]
    return embedding(tokens, table.weight)
