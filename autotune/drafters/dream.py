"""``dream``: an initial block, a cross-attention block over features of the target, a final block (DREAM, section 3.1).

The draft reads the target's embeddings and answers through the target's head, so it has only its blocks. Row i of its
input is the embedding of token i beside the feature that the target had made at token i - 1: that is what is known when
token i is drafted. Behind unverified tokens the draft's own last state stands in for the feature.

The blocks are not the paper's sequential decoder layers, but attention and MLP side by side (``blocks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from autotune.drafters.blocks import BlockCache, DraftBlock, rotation
from autotune.files import Document


class DreamConfig(Document):
    """The sizes of a draft; ``hidden_size`` and ``num_target_layers`` are its target's."""

    kind: str = "dream"
    hidden_size: int = Field(ge=1)
    num_target_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    head_size: int = Field(ge=2, multiple_of=2)
    mlp_size: int = Field(ge=1)
    rope_theta: float = Field(default=10000.0, gt=0)
    crosses: bool = True
    """Without it the middle block is left out: an ablation (DREAM, figure 5)."""
    visual_keep: float = Field(default=0.75, gt=0, le=1)
    """Share of visual tokens that it was made for."""

    @property
    def injection_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it can read: of 12 layers, 12 is the last one's, behind the final norm."""
        return (self.num_target_layers,)


class DreamNetwork(nn.Module):
    """Three blocks of a stream of the target's width."""

    def __init__(self, config: DreamConfig) -> None:
        super().__init__()
        self.config = config

        def block(*, crosses: bool = False) -> DraftBlock:
            return DraftBlock(config.hidden_size, config.num_heads, config.head_size, config.mlp_size, crosses=crosses)

        self.initial = block()
        self.crossing = block(crosses=True) if config.crosses else None
        self.final = block()
        # Of features by the layer that they come from, and last of the draft's own states.
        self.feature_norms = nn.Parameter(torch.ones(len(config.injection_layers) + 1, config.hidden_size))
        self.first_feature = nn.Parameter(torch.zeros(config.hidden_size))  # nothing stands before the first token
        self.norm = nn.LayerNorm(config.hidden_size, bias=False)
        for made in self.blocks:
            for linear in (made.from_stream, made.from_features, made.to_stream):
                if linear is not None:
                    nn.init.normal_(linear.weight, std=0.02 if linear is made.to_stream else linear.in_features**-0.5)

    @property
    def blocks(self) -> list[DraftBlock]:
        """In the order in which they run."""
        return [block for block in (self.initial, self.crossing, self.final) if block is not None]

    def target_features(self, hidden: Tensor, layer: int) -> Tensor:
        """What the cross-attention reads of the output of a target layer, [..., hidden]."""
        number = self.config.injection_layers.index(layer)
        return nn.functional.layer_norm(hidden, hidden.shape[-1:], self.feature_norms[number])

    def own_features(self, states: Tensor) -> Tensor:
        """What it reads of states of its own, [..., hidden]."""
        return nn.functional.layer_norm(states, states.shape[-1:], self.feature_norms[-1])

    def factors(self, places: Tensor) -> Tensor:
        """Rotary factors of tokens at ``places`` [..., n], as the blocks take them."""
        return rotation(places, self.config.head_size, self.config.rope_theta)[..., None, None, :]

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        factors: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Sequence[BlockCache] | None = None,
        begin: int = 0,
        head_masks: Sequence[Tensor] | None = None,
        early: list[Tensor] | None = None,
    ) -> Tensor:
        """States [batch, n, hidden] that stand in for the target's last features, ready for its head.

        Args:
            embeddings: of the tokens, the target's, [batch, n, hidden].
            features: as ``target_features`` or ``own_features`` gave them.
            head_masks: for each block, 0 for heads that are not there.
            early: gets the stream behind the first block, which intermediate distillation aligns.
        """
        stream = embeddings
        for number, block in enumerate(self.blocks):
            stream = block(
                stream,
                features,
                factors,
                mask=mask,
                cache=None if caches is None else caches[number],
                begin=begin,
                head_mask=None if head_masks is None else head_masks[number],
            )
            if number == 0 and early is not None:
                early.append(stream)
        return self.norm(stream)  # type: ignore[no-any-return]
