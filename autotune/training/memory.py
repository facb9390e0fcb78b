"""What training a draft needs of memory and disk, estimated before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autotune.device import free_memory, gib
from autotune.errors import UserError
from autotune.modeling.target import Target

READINGS = 2  # of every lesson: behind the target's features, and behind the draft's own states
# Float32 arrays of [taught tokens, vocabulary] that live together in the backward pass, as measured: the target's
# log-probabilities, and of each reading the draft's and the products of the divergence, some of them with gradients.
LOGITS_COPIES = 9
# What the backward pass keeps, as measured, against inputs and outputs of all linear layers in float32: norms, rotations
# and gates keep their own. In autocast products are of half the size.
ACTIVATIONS = {False: 1.6, True: 0.9}
# Weights, gradients and two moments of Adam, in float32.
BYTES_PER_WEIGHT = 16


@dataclass(frozen=True)
class BatchShape:
    """A batch as a process reads it."""

    num_rows: int
    length: int
    """Tokens of the longest example."""
    num_taught: int
    """Tokens of all examples that are followed by the answer's."""

    @property
    def num_tokens(self) -> int:
        """With padding."""
        return self.num_rows * self.length


@dataclass(frozen=True)
class MemoryNeeds:
    """Of one process, at the batch that needs most."""

    target_bytes: int
    draft_bytes: int
    """With gradients and optimizer."""
    lesson_bytes: int
    """What the target makes of a batch, and what is kept of held-out ones."""
    activation_bytes: int
    """Of the draft, for the backward pass."""
    logits_bytes: int
    shape: BatchShape
    disk_bytes: int
    """Of lessons that are kept and not there yet."""

    @property
    def memory_bytes(self) -> int:
        return self.target_bytes + self.draft_bytes + self.lesson_bytes + self.activation_bytes + self.logits_bytes

    @property
    def loaded_bytes(self) -> int:
        """Of these, what is there when models are loaded and nothing is trained yet."""
        return self.target_bytes + self.draft_bytes // 4

    def __str__(self) -> str:
        parts = {
            "target": self.target_bytes,
            "draft and optimizer": self.draft_bytes,
            "lessons": self.lesson_bytes,
            "activations": self.activation_bytes,
            "logits": self.logits_bytes,
        }
        return ", ".join(f"{name} {gib(number)}" for name, number in parts.items())


def lesson_bytes(shape: BatchShape, hidden_size: int, num_kept: int, num_bytes: int = 2) -> int:
    """Of a lesson as it is kept: embeddings and ``num_kept`` layers, in half precision on disk."""
    return shape.num_tokens * (num_kept + 1) * hidden_size * num_bytes


def memory_needs(
    target: Target,
    network: nn.Module,
    shapes: Sequence[BatchShape],
    *,
    num_kept: int,
    num_held_out: int = 0,
    disk_bytes: int = 0,
    in_half: bool = False,
) -> MemoryNeeds:
    """The needs of the hungriest batch. Vision towers, which see little of a batch at a time, are left out.

    Args:
        num_kept: layers of the target kept in a lesson.
        num_held_out: lessons kept for evaluation.
        in_half: whether the draft's products are computed in half precision.
    """
    text, num_bytes = target.text.config, target.dtype.itemsize
    hidden_size, num_layers = text.hidden_size, len(target.text.layers)
    linears = [module for module in network.modules() if isinstance(module, nn.Linear)]
    per_token = READINGS * ACTIVATIONS[in_half] * 4 * sum(one.in_features + one.out_features for one in linears)
    # Of the target: the outputs of all layers, copies of those kept, and the widest moment inside of a layer.
    widest = 3 * getattr(text, "intermediate_size", 4 * hidden_size) + 8 * hidden_size
    of_reading = ((num_layers + 1 + 2 * (num_kept + 1)) * hidden_size + widest) * num_bytes
    held_out = num_held_out * max(lesson_bytes(shape, hidden_size, num_kept, num_bytes) for shape in shapes)

    def needs(shape: BatchShape) -> MemoryNeeds:
        kept = lesson_bytes(shape, hidden_size, num_kept, num_bytes)
        activations = int(per_token * shape.num_tokens)
        logits = LOGITS_COPIES * 4 * shape.num_taught * target.vocab_size
        # The target reads before the draft does: the room that one has left serves the other.
        reading = max(kept, of_reading * shape.num_tokens - activations - logits)
        return MemoryNeeds(
            target_bytes=weight_bytes(target.model),
            draft_bytes=BYTES_PER_WEIGHT * sum(parameter.numel() for parameter in network.parameters()),
            lesson_bytes=held_out + reading,
            activation_bytes=activations,
            logits_bytes=logits,
            shape=shape,
            disk_bytes=disk_bytes,
        )

    return max((needs(shape) for shape in shapes), key=lambda one: one.memory_bytes)


def check_needs(
    needs: MemoryNeeds, device: torch.device, folder: Path, *, num_processes: int = 1, source: Path | str
) -> str:
    """What the run needs and what is there, as one line. Processes share the CPU's memory and the disk.

    Args:
        folder: where lessons are kept.
        source: the recipe that asks for it.

    Raises:
        UserError: more than is there.
    """
    sharing, place = (1, device) if device.type == "cuda" else (num_processes, device.type)
    memory, disk = sharing * needs.memory_bytes, num_processes * needs.disk_bytes
    free = free_memory(device)
    if free is not None and memory > free + sharing * needs.loaded_bytes:
        raise UserError(
            f"{source}: training needs about {gib(memory)} of memory on {place} ({needs}), and there are "
            f"{gib(free + sharing * needs.loaded_bytes)}; lower batch_size (a process reads {needs.shape.num_rows} at a time) "
            f"or shorten the longest examples ({needs.shape.length:,} tokens)"
        )
    if disk > free_disk(folder):
        raise UserError(
            f"{source}: the lessons that are kept in {folder} need about {gib(disk)}, and {gib(free_disk(folder))} are "
            "free on that disk; lower num_examples, or make room"
        )
    there = "" if free is None else f"; {gib(free + sharing * needs.loaded_bytes)} are there"
    kept = f"; lessons on disk {gib(disk)}, {gib(free_disk(folder))} are free" if disk else ""
    return f"memory on {place}: about {gib(memory)} ({needs}){there}{kept}"


def weight_bytes(module: nn.Module) -> int:
    """Of parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def free_disk(folder: Path) -> int:
    """Bytes free where a folder is or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
