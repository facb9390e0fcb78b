"""``star``: DREAM's skeleton as a supernet (STAR, section 3.1). One set of weights holds a draft for every share of heads
in each block, every share of visual tokens, and every one of the last target layers to read.

A subnet is sliced out for real: the heads it keeps are smaller matrices of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor

from autotune.drafters.dream import DreamConfig, DreamNetwork
from autotune.errors import UserError

HEAD_SHARES = (0.25, 0.5, 0.75, 1.0)
VISUAL_KEEPS = tuple(tenths / 10 for tenths in range(1, 11))
NUM_INJECTION_LAYERS = 5


class StarConfig(DreamConfig):
    """The sizes of the supernet."""

    kind: str = "star"

    visual_keep: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _divisible(self) -> StarConfig:
        if self.num_heads % 4:
            raise ValueError("num_heads must be a multiple of 4, because quarters of them are kept; give 4, 8 or 12")
        return self

    @property
    def injection_layers(self) -> tuple[int, ...]:
        """The outputs of the last five layers; of all layers where there are fewer."""
        first = max(1, self.num_target_layers - NUM_INJECTION_LAYERS + 1)
        return tuple(range(first, self.num_target_layers + 1))


class StarNetwork(DreamNetwork):
    """The supernet, or a slice of it."""

    config: StarConfig

    def __init__(self, config: StarConfig) -> None:
        super().__init__(config)
        # Running mean of eq. 1 over the steps in which a head took part: which heads a subnet keeps.
        self.head_importance = torch.nn.Buffer(torch.zeros(3, config.num_heads))

    def kept_heads(self, shares: Sequence[float]) -> list[Tensor]:
        """The most important heads of each block, in their order in it.

        Raises:
            UserError: a share that keeps no head, or a part of one.
        """
        kept = []
        for share, importance in zip(shares, self.head_importance, strict=True):
            number = share * len(importance)
            if number != round(number) or not 1 <= number <= len(importance):
                raise UserError(
                    f"heads are kept whole: a share of {share:g} of {len(importance)} is {number:g}; "
                    f"choose among {', '.join(f'{one:g}' for one in HEAD_SHARES)}"
                )
            kept.append(importance.topk(int(number)).indices.sort().values)
        return kept

    def head_masks(self, shares: Sequence[float]) -> list[Tensor]:
        """1 for the heads that a subnet keeps, 0 for the others: the masked supernet equals the slice."""
        masks = torch.zeros_like(self.head_importance)
        for mask, kept in zip(masks, self.kept_heads(shares), strict=True):
            mask[kept] = 1.0
        return list(masks)

    def observe_importance(self, taking_part: Sequence[Tensor], *, memory: float = 0.98) -> None:
        """Take the gradients of this step into account (eq. 1), for the heads that were not masked."""
        for running, mask, block in zip(self.head_importance, taking_part, self.blocks, strict=True):
            found = block.head_importance()
            fresh = torch.where(running == 0, found, memory * running + (1 - memory) * found)
            running.copy_(torch.where(mask > 0, fresh, running))

    def sliced(self, shares: Sequence[float]) -> StarNetwork:
        """The subnet with these shares of heads, its weights copied."""
        kept = self.kept_heads(shares)
        if all(len(heads) == self.config.num_heads for heads in kept):
            return self
        network = StarNetwork(self.config)
        network.load_state_dict(self.state_dict())
        network.initial, network.crossing, network.final = (
            block.sliced(heads) for block, heads in zip(self.blocks, kept, strict=True)
        )
        return network.to(self.norm.weight)
