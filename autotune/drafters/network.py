"""What drafts that read the target's features have in common: row i of their input is token i beside what the target had
made of token i - 1, which is what is known when token i + 1 is drafted. Behind unverified tokens the draft's own last
state stands in for that feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from autotune.drafters.blocks import BlockCache, DraftBlock, rotation
from autotune.errors import UserError
from autotune.files import Document
from autotune.modeling.graph_runner import Slots


class NetworkConfig(Document, kind="draft", made_by="autotune train"):
    """The sizes of a draft; ``hidden_size`` and ``num_target_layers`` are its target's."""

    kind: str
    hidden_size: int = Field(ge=1)
    num_target_layers: int = Field(ge=1)
    visual_keep: float = Field(default=1.0, gt=0, le=1)
    """Share of visual tokens that it was made for."""

    @property
    def width(self) -> int:
        """Of its states."""
        return self.hidden_size

    @property
    def injection_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it can read: of 12 layers, 12 is the last one's, behind the final norm."""
        return (self.num_target_layers,)


class PromptRows(NamedTuple):
    """What a draft reads of one prompt."""

    stream: Tensor
    """As ``fuse`` gave it, [n, hidden]."""
    features: Tensor
    """[n, features]"""
    positions: Tensor
    """Of each row in the prompt, ascending, [n]."""
    is_visual: Tensor
    """[n]"""


class DraftNetwork(nn.Module, ABC):
    """A network that drafts (see ``FeatureDraft``, which runs it)."""

    config: NetworkConfig
    embedding: nn.Embedding | None
    """Of tokens; None: the target's."""
    first_feature: Tensor | None
    """Stands before the first token, [features]; None: the first token is not read."""
    token_ids: Tensor | None
    """The target's name of each token of a smaller vocabulary; None: the target's vocabulary."""

    def layers_read(self, injection_layer: int | None) -> tuple[int, ...]:
        """Layers of the target that it reads: the one that was chosen, or its last.

        Raises:
            UserError: a layer that it cannot read.
        """
        layers = self.config.injection_layers
        layer = layers[-1] if injection_layer is None else injection_layer
        if layer not in layers:
            raise UserError(
                f"{self.config.kind} reads the output of one of the target's layers {', '.join(map(str, layers))}; "
                f"got injection_layer {layer}; choose one of them"
            )
        return (layer,)

    @abstractmethod
    def new_caches(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> list[BlockCache]:
        """Room for the keys and values of that many tokens in every block."""

    @abstractmethod
    def target_features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """What it reads of the outputs of the layers read, [..., hidden] each: [..., features]."""

    @abstractmethod
    def own_features(self, states: Tensor) -> Tensor:
        """What it reads of states of its own, [..., hidden]: [..., features]."""

    @abstractmethod
    def factors(self, positions: Tensor) -> Tensor:
        """What its blocks need to know of ``positions`` [..., n]."""

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The stream that enters the first block, [..., hidden]."""
        return embeddings

    def condense(self, rows: PromptRows, question: Tensor, generator: torch.Generator | None = None) -> PromptRows:
        """Fewer rows in place of those of a prompt's visual tokens; all of them where nothing else is said.

        Args:
            question: the target's last feature of the prompt, [hidden].
            generator: of the noise in training; None chooses without.
        """
        return rows

    @abstractmethod
    def forward(
        self,
        stream: Tensor,
        features: Tensor,
        factors: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Sequence[BlockCache] | None = None,
        begin: int | Slots = 0,
    ) -> Tensor:
        """States [batch, n, hidden]; masks and caches as in ``DraftBlock``."""

    def logits(self, states: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Of states, through the target's head; [..., vocabulary]."""
        return head(states)


class BlocksConfig(NetworkConfig):
    """The sizes of a draft of ours."""

    num_heads: int = Field(ge=1)
    head_size: int = Field(ge=2, multiple_of=2)
    mlp_size: int = Field(ge=1)
    rope_theta: float = Field(default=10000.0, gt=0)


class BlocksNetwork(DraftNetwork):
    """A stream of the target's width through blocks; its states stand in for the target's last features, whose head
    they share.
    """

    config: BlocksConfig
    first_feature: nn.Parameter

    def __init__(self, config: BlocksConfig) -> None:
        super().__init__()
        self.config = config
        # Of features by the layer that they come from, and last of the draft's own states.
        self.feature_norms = nn.Parameter(torch.ones(len(config.injection_layers) + 1, config.hidden_size))
        self.first_feature = nn.Parameter(torch.zeros(config.hidden_size))
        self.norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.embedding = self.token_ids = None

    @property
    @abstractmethod
    def blocks(self) -> list[DraftBlock]:
        """In the order in which they run."""

    def new_block(self, *, crosses: bool = False) -> DraftBlock:
        """A block with random weights."""
        config = self.config
        block = DraftBlock(config.hidden_size, config.num_heads, config.head_size, config.mlp_size, crosses=crosses)
        for linear in (block.from_stream, block.from_features, block.to_stream):
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02 if linear is block.to_stream else linear.in_features**-0.5)
        return block

    def new_caches(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> list[BlockCache]:
        """Room for the keys and values of that many tokens in every block."""
        size = self.config.head_size
        return [BlockCache(block.num_heads, size, capacity, dtype=dtype, device=device) for block in self.blocks]

    def target_features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The normed output of the one layer read."""
        ((layer, states),) = hidden.items()
        number = self.config.injection_layers.index(layer)
        return nn.functional.layer_norm(states, states.shape[-1:], self.feature_norms[number])

    def own_features(self, states: Tensor) -> Tensor:
        """Normed states."""
        return nn.functional.layer_norm(states, states.shape[-1:], self.feature_norms[-1])

    def factors(self, positions: Tensor) -> Tensor:
        """Rotary factors of tokens at ``positions`` [..., n]."""
        return rotation(positions, self.config.head_size, self.config.rope_theta)

    def forward(
        self,
        stream: Tensor,
        features: Tensor,
        factors: Tensor,
        *,
        mask: Tensor | None = None,
        caches: Sequence[BlockCache] | None = None,
        begin: int | Slots = 0,
        head_masks: Sequence[Tensor] | None = None,
        early: list[Tensor] | None = None,
    ) -> Tensor:
        """States [batch, n, hidden], ready for the target's head.

        Args:
            stream: as ``fuse`` gave it.
            features: as ``target_features`` or ``own_features`` gave them.
            head_masks: for each block, 0 for heads that are not there.
            early: gets the stream behind the first block, which intermediate distillation aligns.
        """
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
