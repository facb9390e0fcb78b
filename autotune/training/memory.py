"""Estimates of the memory and disk that training a draft needs, made before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autotune.device import check_room, free_memory, gib
from autotune.errors import UserError
from autotune.modeling.quantization import weight_bytes
from autotune.modeling.target import Target

# Float32 arrays of [loss tokens, vocabulary] that exist at the same time in the backward pass, as measured: the
# target's log-probabilities, and for each pass the draft's and the products of the divergence, some of them with
# gradients.
LOGITS_COPIES = 9
# Memory kept for the backward pass, as measured, relative to the inputs and outputs of all linear layers in float32
# (norms, rotations and gates add to it), by half precision: with autocast, products have half the size.
ACTIVATIONS = {False: 1.6, True: 0.9}
# Weights, gradients and two moments of Adam, in float32.
BYTES_PER_WEIGHT = 16


@dataclass(frozen=True)
class BatchShape:
    """The size of the batch that one process reads."""

    num_rows: int
    length: int
    """Tokens of the longest example."""
    num_loss_tokens: int
    """Tokens of all examples that are followed by a token of the answer."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.num_rows * self.length


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one process for the largest batch."""

    parts: dict[str, int]
    """Bytes by name."""
    loaded_bytes: int
    """The part of it that is allocated before the first step."""
    disk_bytes: int
    """Size of the teacher batches that will be cached."""
    shape: BatchShape


def teacher_batch_bytes(shape: BatchShape, hidden_size: int, num_layers_kept: int, num_bytes: int = 2) -> int:
    """Size of a stored teacher batch: embeddings and ``num_layers_kept`` layers, in half precision on disk."""
    return shape.num_tokens * (num_layers_kept + 1) * hidden_size * num_bytes


def estimate_memory(
    target: Target,
    network: nn.Module,
    shapes: Sequence[BatchShape],
    *,
    num_layers_kept: int,
    vocabulary: int,
    num_held_out: int = 0,
    disk_bytes: int = 0,
    half_precision: bool = False,
) -> MemoryEstimate:
    """The memory of the largest batch. Vision towers, which read a small part of a batch at a time, are ignored.

    Args:
        num_layers_kept: layers of the target kept in a teacher batch.
        vocabulary: tokens over which draft and target are compared.
        num_held_out: teacher batches kept for evaluation.
        half_precision: whether the draft's products are computed in half precision.
    """
    text, num_bytes = target.text.config, target.dtype.itemsize
    hidden_size, num_layers = text.hidden_size, len(target.text.layers)
    linears = [module for module in network.modules() if isinstance(module, nn.Linear)]
    num_activations = sum(linear.in_features + linear.out_features for linear in linears)
    per_token = ACTIVATIONS[half_precision] * 4 * num_activations
    # For the target: the outputs of all layers, copies of those kept, and the peak inside a layer.
    widest = 3 * getattr(text, "intermediate_size", 4 * hidden_size) + 8 * hidden_size
    target_per_token = ((num_layers + 1 + 2 * (num_layers_kept + 1)) * hidden_size + widest) * num_bytes

    def batch_bytes(shape: BatchShape) -> int:
        return teacher_batch_bytes(shape, hidden_size, num_layers_kept, num_bytes)

    held_out = num_held_out * max(map(batch_bytes, shapes))
    target_bytes = weight_bytes(target.model)
    draft_bytes = BYTES_PER_WEIGHT * sum(parameter.numel() for parameter in network.parameters())

    def needs(shape: BatchShape) -> MemoryEstimate:
        # Every token is read with the target's features, the loss tokens again with the draft's own states.
        activations = int(per_token * (shape.num_tokens + shape.num_loss_tokens))
        logits = LOGITS_COPIES * 4 * shape.num_loss_tokens * vocabulary
        # The target runs before the draft, so both use the same memory in turn.
        teacher_bytes = max(batch_bytes(shape), target_per_token * shape.num_tokens - activations - logits)
        parts = {
            "target": target_bytes,
            "draft and optimizer": draft_bytes,
            "teacher batches": held_out + teacher_bytes,  # outputs on a batch, and those kept of held-out batches
            "activations": activations,  # of the draft, for the backward pass
            "logits": logits,
        }
        return MemoryEstimate(parts, target_bytes + draft_bytes // 4, disk_bytes, shape)

    return max(map(needs, shapes), key=lambda estimate: sum(estimate.parts.values()))


def check_memory(
    needs: MemoryEstimate, device: torch.device, folder: Path, *, num_processes: int = 1, source: Path | str
) -> str:
    """Compare an estimate with the memory and disk available; returns both as one line.

    Processes share the memory of the CPU and the disk.

    Args:
        folder: where teacher batches are cached.
        source: the recipe, for messages.

    Raises:
        UserError: more than is available.
    """
    sharing, name = (1, str(device)) if device.type == "cuda" else (num_processes, device.type)
    parts = {part: sharing * num_bytes for part, num_bytes in needs.parts.items()}
    loaded, disk, free = sharing * needs.loaded_bytes, num_processes * needs.disk_bytes, free_disk(folder)
    advice = (
        f"lower batch_size (a process reads {needs.shape.num_rows} at a time) or shorten the longest examples "
        f"({needs.shape.length:,} tokens)"
    )
    check_room(name, parts, what=f"{source}: training", advice=advice, freed=loaded)
    if disk > free:
        raise UserError(
            f"{source}: the teacher batches cached in {folder} need about {gib(disk)}, and {gib(free)} are free on that disk; "
            "lower num_examples, or free some space"
        )
    listed = ", ".join(f"{part} {gib(num_bytes)}" for part, num_bytes in parts.items())
    cached = f"; teacher batches on disk {gib(disk)}, {gib(free)} free" if disk else ""
    available = gib(free_memory(device) + loaded)
    return f"memory on {name}: about {gib(sum(parts.values()))} ({listed}); {available} available{cached}"


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder that may not exist yet."""
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
