"""Networks of drafts that read the target's features.

Row i of their input is token i with the target's features of token i - 1, the last ones known when token i + 1 is
drafted. After unverified tokens, the draft's own last state takes the place of these features.

In the training of EAGLE-3 and multi-token prediction heads, drafting is unrolled for a few tokens at every position
(training-time test, EAGLE-3, arXiv 2503.01840). In step 0 every row reads the target's features of the token before. In
step k, row i reads the state that step k - 1 gave row i - 1, and attends to what it would have in its cache: keys of
step 0 up to row i - k, the last that read the target, and one key of every later step, of rows i - k + 1 to i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from autotune.documents.loss_settings import LossSettings
from autotune.documents.subnet import Operator
from autotune.drafters.blocks import WITHIN_BATCH, AttentionContext, BlockCache
from autotune.drafters.teacher_batch import Divergence, Metrics, TeacherBatch, divergence
from autotune.errors import UserError
from autotune.files import Document
from autotune.modeling.target import Target
from autotune.modeling.weight_files import CONFIG, WEIGHTS, save_tensors

NOT_TRAINED = -1.0  # frequency of a token
FREQUENCIES = "token_frequencies"  # tensor of a draft's weights
ROWS_COUNTED = 1024  # tokens at a time


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
    """A draft network, which ``FeatureDraft`` runs, and ``autotune train`` makes, trains and saves."""

    kind: ClassVar[str]
    config_type: ClassVar[type[NetworkConfig] | None]
    """The document that ``save`` writes as ``config.json``; None: the format of another project."""
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

    @classmethod
    @abstractmethod
    def new(cls, sizes: Mapping[str, Any], target: Target, *, source: str) -> Self:
        """Make a network with new weights for a target. ``sizes`` are config fields of the draft, from the recipe
        ``source``.

        Raises:
            UserError: unknown or invalid sizes, or a target that cannot have such a draft.
        """

    @property
    def layers_in_training(self) -> tuple[int, ...]:
        """Layers of the target whose outputs the network reads in some step of its training."""
        return self.config.injection_layers

    def keep_tokens(self, token_ids: Tensor, head_rows: Tensor) -> None:
        """Called before training with the ids [n] of the tokens over which the draft will be compared, and their rows
        [n, hidden] of the target's output head: a network with an output head of its own begins with these.
        """

    @abstractmethod
    def loss(
        self, batch: TeacherBatch, settings: LossSettings, generator: torch.Generator, compare: Divergence = divergence
    ) -> tuple[Tensor, Metrics]:
        """The loss of one teacher batch, and metrics of it: of the full network while it is in evaluation mode.

        ``agreement`` is the share of tokens on which the draft's most probable token is the target's, given the
        target's features; ``own_agreement`` the same given the draft's own states.

        Args:
            generator: source of everything that is drawn at random.
            compare: the divergence from the target's distributions, perhaps compiled.
        """

    @property
    def layers_in_preparation(self) -> tuple[int, ...]:
        """Layers of the target whose outputs ``prepare`` reads; empty: new weights need no preparation."""
        return ()

    def prepare(self, batches: Iterable[TeacherBatch]) -> None:
        """Called before the first step on new weights, with the first teacher batches: compute weights from them."""

    def after_backward(self) -> None:
        """Called when the gradients of a training step have been computed."""

    @torch.no_grad()
    def finish(self, batches: Iterable[TeacherBatch]) -> None:
        """Called after the last step, with teacher batches of the last stage, which are read as they are asked for:
        count how often the target is expected to emit each token of its vocabulary along them.
        """
        total: Tensor | float = 0.0
        for batch in batches:
            for rows in batch.hidden[self.config.num_target_layers][batch.loss_mask].split(ROWS_COUNTED):
                total = total + batch.head(rows).double().softmax(-1).sum(0)
        assert isinstance(total, Tensor), "no batches"
        self.token_frequencies = total.float()

    def saved_tensors(self) -> dict[str, Tensor]:
        """The weights in bfloat16, tensors of integers, and the frequencies of tokens in float32."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        floats = {name: t.to(torch.bfloat16) for name, t in tensors.items() if t.is_floating_point()}
        frequencies = self.token_frequencies
        return tensors | floats | ({} if frequencies is None else {FREQUENCIES: frequencies.float().contiguous()})

    def save(self, folder: Path) -> None:
        """Write config and weights in bfloat16, which are loaded in the target's precision."""
        save_tensors(folder / WEIGHTS, self.saved_tensors())
        self.config.save(folder / CONFIG)


STEP_WEIGHT = 0.8  # of the loss of a step, relative to the step before


class UnrolledKeys:
    """The keys and values of all steps so far, one step behind the other (``KeysValues``)."""

    def __init__(self) -> None:
        self._all: Tensor | None = None

    def write(self, keys_values: Tensor, begin: int | Tensor) -> tuple[Tensor, Tensor]:
        self._all = keys_values if self._all is None else torch.cat([self._all, keys_values], 3)
        keys, values = self._all.unbind(2)
        return keys, values


def unrolled_mask(num_rows: int, step: int, first: int = 0) -> Tensor:
    """Whether row i of a step attends to column (step j, row) [1, 1, rows, columns]; every row sees itself. All steps
    but 0 have the rows from ``first`` on.
    """
    columns = torch.arange(num_rows)
    rows = columns[first if step else 0 :, None]
    of_steps = [columns <= rows - step, *(columns[first:] == rows - step + earlier for earlier in range(1, step + 1))]
    return torch.cat(of_steps, 1)[None, None]


class UnrolledNetwork(DraftNetwork):
    """A head of one layer that drafts further tokens from its own states."""

    def unrolled_states(
        self, stream: Tensor, features: Tensor, num_steps: int, *, first: int = 0, positions: Tensor | None = None
    ) -> Iterator[Tensor]:
        """States [batch, rows, state size] of every step, for embeddings ``stream`` and the target's ``features``,
        [batch, n, ...] each. Step 0 has all n rows, the others those from ``first`` on. In step k, the first k of these
        mean nothing, because there is nothing before them to be drafted from. ``positions`` [axes, batch, n] are for
        networks with three axes.
        """
        rows = torch.arange(stream.shape[1], device=stream.device)
        positions = rows[None, None] if positions is None or self.axes is None else positions
        factors, cache = self.join_axes(self.factors(positions)), UnrolledKeys()
        for step in range(num_steps):
            context = AttentionContext(unrolled_mask(len(rows), step, first).to(stream.device), (cache,))
            states = self(self.fuse(stream, features), features, factors, context)
            yield states
            if step == 0:
                stream, features, factors = stream[:, first:], features[:, first:], factors[:, first:]
                states = states[:, first:]
            features = torch.cat([features[:, :1], self.own_features(states)[:, :-1]], 1)

    def loss(
        self, batch: TeacherBatch, settings: LossSettings, generator: torch.Generator, compare: Divergence = divergence
    ) -> tuple[Tensor, Metrics]:
        """The divergence from the target's distribution, averaged over the steps with falling weights.
        ``own_agreement`` is that of the later steps.
        """
        hidden, last, num_steps = batch.hidden, self.config.num_target_layers, settings.unrolled_steps
        features = self.target_features({layer: hidden[layer][:, :-1] for layer in self.layers_read(None)})
        stream, is_loss = batch.embeddings[:, 1:], batch.loss_mask[:, 1:]  # sequences without their first token
        teacher_logprobs = batch.head(hidden[last][:, 1:][is_loss]).float().log_softmax(-1)
        row = is_loss.nonzero()[:, 1]
        first = max(0, int(row.min()) - num_steps)  # drafting is unrolled from the first of these tokens on
        losses, agreements = [], []
        # The position is that of the token before, whose features are read, as where public heads are trained.
        steps = self.unrolled_states(stream, features, num_steps, first=first, positions=batch.positions[..., :-1])
        for step, states in enumerate(steps):
            is_drafted = row >= first + step
            logits = self.logits(states[is_loss[:, -states.shape[1] :]], batch.head)
            token_losses, agrees = compare(logits, teacher_logprobs)
            losses.append(token_losses[is_drafted].mean())
            agreements.append(agrees[is_drafted].mean().item())
        weights = torch.tensor([STEP_WEIGHT**step for step in range(num_steps)], device=stream.device)
        loss = (torch.stack(losses) * weights).sum() / weights.sum()
        later = agreements[1:] or agreements
        return loss, {"loss": loss.item(), "agreement": agreements[0], "own_agreement": sum(later) / len(later)}
