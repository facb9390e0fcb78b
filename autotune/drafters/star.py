"""``star``: DREAM's blocks as a supernet (STAR, section 3.1). One set of weights contains a draft for every share of
heads in each block, every share of visual tokens, and every injection layer among the target's last layers.

A subnet is a copy with smaller matrices for the heads that it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from autotune.documents.loss_settings import LossSettings
from autotune.documents.subnet import Subnet
from autotune.drafters.dream import SELF_CROSS_SELF, DreamConfig, DreamNetwork
from autotune.errors import UserError

HEAD_SHARES = (0.25, 0.5, 0.75, 1.0)
VISUAL_KEEPS = tuple(tenths / 10 for tenths in range(1, 11))
NUM_INJECTION_LAYERS = 5
MEMORY = 0.98  # of the importance of heads, for one step
T = TypeVar("T")


class StarConfig(DreamConfig):
    kind: str = "star"

    visual_keep: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _divisible(self) -> StarConfig:
        if self.num_heads % 4:
            raise ValueError(
                "num_heads must be a multiple of 4, because subnets keep quarters of them; give 4, 8 or 12"
            )
        if self.blocks != SELF_CROSS_SELF:
            raise ValueError(
                f"blocks of a supernet are {', '.join(SELF_CROSS_SELF)}; got {', '.join(self.blocks)}; leave blocks out"
            )
        return self

    @property
    def injection_layers(self) -> tuple[int, ...]:
        """The last five layers, or all layers if there are fewer."""
        first = max(1, self.num_target_layers - NUM_INJECTION_LAYERS + 1)
        return tuple(range(first, self.num_target_layers + 1))


class StarNetwork(DreamNetwork):
    """The supernet, or a subnet sliced from it."""

    kind = "star"
    config_type = StarConfig
    loss_weights = (1.0, 0.2)  # STAR, section 4
    config: StarConfig
    is_supernet = True

    def __init__(self, config: StarConfig) -> None:
        super().__init__(config)
        # Running mean of eq. 1 over the training steps in which a head was not masked; subnets keep the highest.
        self.head_importance = torch.nn.Buffer(torch.zeros(len(config.blocks), config.num_heads))
        self._trained_heads: list[Tensor] | None = None  # masks of the step whose gradients are computed

    def kept_heads(self, shares: Sequence[float]) -> list[Tensor]:
        """Indices of the most important heads of each block, ascending.

        Raises:
            UserError: a share that is not a whole number of heads.
        """
        kept = []
        for share, importance in zip(shares, self.head_importance, strict=True):
            number = share * len(importance)
            if number != round(number) or not 1 <= number <= len(importance):
                raise UserError(
                    f"heads are kept whole: a share of {share:g} of {len(importance)} is {number:g}; "
                    f"choose among {', '.join(f'{known:g}' for known in HEAD_SHARES)}"
                )
            kept.append(importance.topk(int(number)).indices.sort().values)
        return kept

    def head_masks(self, shares: Sequence[float]) -> list[Tensor]:
        """1 for heads that a subnet keeps, 0 for others. The masked supernet equals the sliced one."""
        masks = torch.zeros_like(self.head_importance)
        for mask, kept in zip(masks, self.kept_heads(shares), strict=True):
            mask[kept] = 1.0
        return list(masks)

    def drawn_subnet(self, settings: LossSettings, generator: torch.Generator) -> tuple[Subnet, list[Tensor] | None]:
        if not self.training:
            return super().drawn_subnet(settings, generator)
        subnet = settings.subnet or Subnet()
        is_full = settings.whole_share > 0 and float(torch.rand((), generator=generator)) < settings.whole_share
        if settings.subnets == "random" and not is_full:
            subnet = self.random_subnet(generator)
        self._trained_heads = self.head_masks(subnet.head_shares)
        return subnet, self._trained_heads

    def random_subnet(self, generator: torch.Generator) -> Subnet:
        """A random subnet; the heads of each block are drawn independently (STAR, algorithm 1)."""

        def choice(values: Sequence[T]) -> T:
            return values[int(torch.randint(len(values), (), generator=generator))]

        return Subnet(
            heads=(choice(HEAD_SHARES), choice(HEAD_SHARES), choice(HEAD_SHARES)),
            visual_keep=choice(VISUAL_KEEPS),
            injection_layer=choice(self.config.injection_layers),
        )

    def after_backward(self) -> None:
        """Update the importance of heads that are not masked from the gradients of this step (eq. 1)."""
        assert self._trained_heads is not None
        for running, mask, block in zip(self.head_importance, self._trained_heads, self.blocks, strict=True):
            current = block.head_importance()
            updated = torch.where(running == 0, current, MEMORY * running + (1 - MEMORY) * current)
            running.copy_(torch.where(mask > 0, updated, running))

    def sliced(self, shares: Sequence[float]) -> StarNetwork:
        """The subnet with these shares of heads, with copied weights."""
        kept = self.kept_heads(shares)
        if all(len(heads) == self.config.num_heads for heads in kept):
            return self
        network = StarNetwork(self.config)
        network.load_state_dict(self.state_dict())
        network.token_frequencies = self.token_frequencies
        for name, block, heads in zip(self.config.blocks, self.blocks, kept, strict=True):
            network.add_module(name, block.sliced(heads))
        return network.to(self.norm.weight)
