"""Networks that ``autotune train`` makes, trains and saves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from autotune.documents.loss_settings import LossSettings
from autotune.drafters.network import DraftNetwork, NetworkConfig
from autotune.drafters.teacher_batch import TeacherBatch
from autotune.errors import UserError
from autotune.modeling.target import Target
from autotune.modeling.weight_files import check_whole, save_tensors

CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
FREQUENCIES = "token_frequencies"  # tensor of a draft's weights
ROWS_COUNTED = 1024  # tokens at a time
Metrics = dict[str, float]
"""Figures to display and log, by name."""
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``divergence``, or its compiled form."""


def divergence(logits: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || draft) of every token, and 1 where the most probable tokens agree, otherwise 0; [tokens] each, from
    the draft's ``logits`` and the target's log-probabilities in float32, [tokens, vocabulary] each.
    """
    logprobs = logits.float().log_softmax(-1)
    found = functional.kl_div(logprobs, teacher_logprobs, reduction="none", log_target=True).sum(-1)
    return found, (logprobs.argmax(-1) == teacher_logprobs.argmax(-1)).float()


class TrainableNetwork(DraftNetwork):
    kind: ClassVar[str]
    config_type: ClassVar[type[NetworkConfig] | None]
    """The document that ``save`` writes as ``config.json``; None: the format of another project."""

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


def read_tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    """The tensors of a published draft; ``kind`` names it in messages. Of a pickle, torch reads tensors alone and runs
    no code.

    Raises:
        UserError: no file of weights, or a pickle of anything else.
    """
    path = folder / WEIGHTS if (folder / WEIGHTS).exists() else folder / PICKLED
    if not path.exists():
        raise UserError(
            f"{folder}: {kind} is read from {WEIGHTS} or {PICKLED}; there is none; give the folder of a whole draft"
        )
    try:
        if path.name == WEIGHTS:
            check_whole(path)
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(tensors, dict) and all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            return tensors
        reason = "it holds something else"
    except UserError:
        raise
    except Exception as error:  # both libraries raise many kinds for damaged files
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    raise UserError(f"{path}: no tensors can be read from it ({reason}); restore the file, or save them as {WEIGHTS}")
