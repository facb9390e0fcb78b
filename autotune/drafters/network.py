"""Networks of drafts that read the target's features.

Row i of their input is token i with the target's features of token i - 1, the last ones known when token i + 1 is
drafted. After unverified tokens, the draft's own last state takes the place of these features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from autotune.documents.subnet import Operator
from autotune.drafters.blocks import WITHIN_BATCH, AttentionContext, BlockCache, DraftBlock, rotation
from autotune.errors import UserError
from autotune.files import Document
from autotune.modeling.weight_files import check_finite

NOT_TRAINED = -1.0  # frequency of a token


class NetworkConfig(Document, kind="draft", made_by="autotune train"):
    """Sizes of a draft network."""

    kind: str
    hidden_size: int = Field(ge=1)
    num_target_layers: int = Field(ge=1)
    visual_keep: float = Field(default=1.0, gt=0, le=1)
    """Share of visual tokens that the network was trained for."""

    @property
    def width(self) -> int:
        """Size of the network's states."""
        return self.hidden_size

    @property
    def injection_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs the network can read; the number of layers is the final norm."""
        return (self.num_target_layers,)


class PromptRows(NamedTuple):
    """The network's input for one prompt."""

    stream: Tensor  # output of ``fuse``, [n, hidden]
    features: Tensor  # [n, features]
    positions: Tensor  # index of each row in the prompt, ascending, [n]
    is_visual: Tensor  # [n]


class DraftNetwork(nn.Module, ABC):
    """A draft network, which ``FeatureDraft`` runs."""

    config: NetworkConfig
    embedding: nn.Embedding | None  # token embedding; None: the target's
    first_feature: Tensor | None  # features before the first token, [features]; None: the first token is left out
    token_ids: Tensor | None  # the target's id of each token of a smaller vocabulary; None: the same ids
    is_supernet = False
    """Whether heads and the injection layer can be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.token_frequencies: Tensor | None
        """How often the target emitted each token of its vocabulary in training, [vocabulary]; ``NOT_TRAINED`` for
        those over which the network was not trained. None: not known.
        """
        self.register_buffer("token_frequencies", None, persistent=False)
        self.axes: Tensor | None
        """The position axis (time, height, width) by which each element of a head turns, [head size]; None: one axis.
        """
        self.register_buffer("axes", None, persistent=False)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Operators that compress visual tokens, of which one can be chosen."""
        return ()

    def layers_read(self, injection_layer: int | None) -> tuple[int, ...]:
        """Layers of the target that the network reads: the injection layer, or by default the last one.

        Raises:
            UserError: a layer that the network cannot read.
        """
        layers = self.config.injection_layers
        layer = layers[-1] if injection_layer is None else injection_layer
        if layer not in layers:
            raise UserError(
                f"{self.config.kind} reads the output of one of the target's layers {', '.join(map(str, layers))}; "
                f"got injection_layer {layer}; choose one of them"
            )
        return (layer,)

    def fix_operator(self, operator: Operator | None, ratio: int | None) -> None:
        """Compress the visual tokens of every prompt with one operator (see ``Compressor.fix``).

        Raises:
            UserError: a network without a compressor, or without this operator.
        """
        raise UserError(
            f"only a specvlm draft compresses visual tokens; got operator {operator} for {self.config.kind}; leave operator "
            "and ratio out"
        )

    @property
    def trained_share(self) -> float | None:
        """Share of the target's vocabulary over which the network was trained, if some tokens were left out."""
        if (frequencies := self.token_frequencies) is None or bool((is_known := frequencies > NOT_TRAINED).all()):
            return None
        return int(is_known.sum()) / len(frequencies)

    def cut_vocabulary(self, share: float) -> None:
        """Propose only the most frequent tokens: this share of the vocabulary, and none over which the network was not
        trained. The draft's head then computes fewer logits, and the target verifies with its whole vocabulary
        (FR-Spec, Zhao et al. 2025).

        Raises:
            UserError: a network without token frequencies.
        """
        if (frequencies := self.token_frequencies) is None:
            raise UserError(
                f"this {self.config.kind} draft has no token frequencies, so its vocabulary cannot be cut; got vocabulary {share}; "
                "leave it out, or train the draft with autotune train, which counts tokens"
            )
        ranked = frequencies.argsort(descending=True, stable=True)
        number = min(round(share * len(frequencies)), int((frequencies > NOT_TRAINED).sum()))
        self.token_ids = ranked[: max(1, number)].sort().values

    @property
    def has_cross_attention(self) -> bool:
        """Whether some blocks attend to the features of all prompt tokens, pruned ones included."""
        return self.crossing_share > 0

    @property
    def crossing_share(self) -> float:
        """Share of the keys and values of a token in cross-attention blocks."""
        return 0.0

    @abstractmethod
    def new_caches(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> list[BlockCache]:
        """A cache for ``capacity`` tokens for each block."""

    @abstractmethod
    def target_features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Features [..., features] from outputs of the target's layers, [..., hidden] each."""

    def own_features(self, states: Tensor) -> Tensor:
        """Features [..., features] from the network's own states [..., hidden]; by default the states themselves."""
        return states

    @abstractmethod
    def factors(self, positions: Tensor) -> Tensor:
        """Rotary factors of ``positions`` [..., n]."""

    def join_axes(self, factors: Tensor) -> Tensor:
        """Rotary factors [..., n, 2, head size] of tokens, from those of their positions, [1 or 3 axes, ..., n, 2, head
        size].
        """
        if self.axes is None:
            return factors[0]
        return factors.expand(3, *factors.shape[1:]).gather(0, self.axes.expand(1, *factors.shape[1:]))[0]

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The stream that enters the first block, [..., hidden]."""
        return embeddings

    def condense(
        self,
        rows: PromptRows,
        question: Tensor,
        generator: torch.Generator | None = None,
        operator: Operator | None = None,
    ) -> PromptRows:
        """Compress the rows of a prompt's visual tokens; by default unchanged.

        Args:
            question: the target's output for the prompt's last token, [hidden].
            generator: source of noise in training; None: deterministic.
            operator: compresses the rows; None for the choice of the network's gate.
        """
        return rows

    @abstractmethod
    def forward(
        self, stream: Tensor, features: Tensor, factors: Tensor, context: AttentionContext = WITHIN_BATCH
    ) -> Tensor:
        """States [batch, n, hidden], inputs of the target's head.

        Args:
            stream: output of ``fuse``, [batch, n, hidden].
            features: output of ``target_features`` or ``own_features`` for each of the n tokens.
            factors: output of ``factors`` for each of the n tokens.
        """

    def logits(self, states: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [..., vocabulary] of states through the target's head."""
        return head(states)


class BlocksConfig(NetworkConfig):
    """Sizes of a network of ``DraftBlock``s."""

    num_heads: int = Field(ge=1)
    head_size: int = Field(ge=2, multiple_of=2)
    mlp_size: int = Field(ge=1)
    rope_theta: float = Field(default=10000.0, gt=0)


class BlocksNetwork(DraftNetwork):
    """A residual stream of the target's width through ``DraftBlock``s, followed by the target's head."""

    config: BlocksConfig
    first_feature: nn.Parameter

    def __init__(self, config: BlocksConfig) -> None:
        super().__init__()
        self.config = config
        # Norm weights of the features of each injection layer, then of the draft's own states.
        self.feature_norms = nn.Parameter(torch.ones(len(config.injection_layers) + 1, config.hidden_size))
        self.first_feature = nn.Parameter(torch.zeros(config.hidden_size))
        self.norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.embedding = None
        self.token_ids: Tensor | None
        self.register_buffer("token_ids", None, persistent=False)

    @property
    @abstractmethod
    def blocks(self) -> list[DraftBlock]:
        """Blocks in execution order."""

    @property
    def crossing_share(self) -> float:
        across = sum(block.num_heads for block in self.blocks if block.has_cross_attention)
        return across / sum(block.num_heads for block in self.blocks)

    def new_block(self, *, has_cross_attention: bool = False) -> DraftBlock:
        config = self.config
        sizes = config.hidden_size, config.num_heads, config.head_size, config.mlp_size
        block = DraftBlock(*sizes, has_cross_attention=has_cross_attention)
        for linear in (block.from_stream, block.from_features, block.to_stream):
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02 if linear is block.to_stream else linear.in_features**-0.5)
        return block

    def new_caches(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> list[BlockCache]:
        size = self.config.head_size
        return [BlockCache(block.num_heads, size, capacity, dtype=dtype, device=device) for block in self.blocks]

    def target_features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The normalized output of the injection layer."""
        ((layer, states),) = hidden.items()
        number = self.config.injection_layers.index(layer)
        return nn.functional.layer_norm(states, states.shape[-1:], self.feature_norms[number])

    def own_features(self, states: Tensor) -> Tensor:
        return nn.functional.layer_norm(states, states.shape[-1:], self.feature_norms[-1])

    def factors(self, positions: Tensor) -> Tensor:
        return rotation(positions, self.config.head_size, self.config.rope_theta)

    def forward(
        self,
        stream: Tensor,
        features: Tensor,
        factors: Tensor,
        context: AttentionContext = WITHIN_BATCH,
        *,
        head_masks: Sequence[Tensor] | None = None,
        fan_out: Sequence[Tensor] | None = None,
        early: list[Tensor] | None = None,
    ) -> Tensor:
        """See ``DraftNetwork``.

        Args:
            head_masks: 0 for masked heads, for each block.
            fan_out: for each block, the row of the stream that each row of the block's batch continues; None: its own.
            early: receives the stream after the first block, which intermediate distillation aligns.
        """
        for number, block in enumerate(self.blocks):
            if fan_out is not None:
                stream = stream[fan_out[number]]
            stream = block(
                stream,
                features,
                factors,
                context,
                cache=context.caches[number],
                head_mask=None if head_masks is None else head_masks[number],
            )
            if number == 0 and early is not None:
                early.append(stream)
        return self.norm(stream)  # type: ignore[no-any-return]


def set_weights(network: nn.Module, tensors: Mapping[str, Tensor], *, source: object, what: str, advice: str) -> None:
    """Set all weights of a network. Messages name the weights' ``source``, ``what`` they are for, and the next step.

    A network on the device ``meta`` is only compared with the tensors, before one is made whose sizes may be damaged.

    Raises:
        UserError: missing or other tensors, tensors of other shapes, or weights that are not finite.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in (*shapes, *found):
        if found.get(name) != shapes.get(name):
            reason = f"{name} has shape {found.get(name)} in place of {shapes.get(name)}"
            if name not in found or name not in shapes:
                reason = f"{name} is {'missing' if name in shapes else 'none of them'}"
            raise UserError(f"{source}: not the tensors of {what} ({reason}); {advice}")
    check_finite(tensors, source=source)
    if not any(tensor.is_meta for tensor in network.state_dict().values()):
        network.load_state_dict(tensors)
