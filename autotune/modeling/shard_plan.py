"""How a model is divided among processes: which layers each of them holds a part of, and how many bytes that takes."""

from __future__ import annotations

from typing import Any

from autotune.errors import UserError
from autotune.modeling.text_model import layer_plan, text_model_of

_WHOLE = "load a target without torchrun, a draft without --shard-draft"


def shard_bytes(empty: Any, num_shards: int) -> int:
    """Bytes of the weights of a process that holds a share of the layers and all else."""
    whole = sum(parameter.nbytes for parameter in empty.parameters())
    layers = sum(parameter.nbytes for layer in text_model_of(empty).layers for parameter in layer.parameters())
    return whole - layers + layers // num_shards


def shard_plan(empty: Any, name: str, num_shards: int, *, is_whole: bool) -> Any:
    """How transformers divides the layers of a text model among processes, and nothing else (``layer_plan``).

    Args:
        empty: the model, without content.
        is_whole: its weights are neither quantized nor of a GGUF file.

    Raises:
        UserError: the weights cannot be divided, transformers has no plan, or the heads cannot be divided.
    """
    from transformers.distributed import DistributedConfig

    text, plan = text_model_of(empty), layer_plan(empty)
    if not is_whole or text.has_states:
        kind = "with recurrent or convolution states" if is_whole else "quantized, or of a GGUF file"
        raise UserError(f"{name}: a model {kind} is not divided among processes; {_WHOLE}")
    if not plan:
        raise UserError(
            f"{name}: transformers cannot divide models of type {text.config.model_type} among processes; give a model with "
            f"a tensor-parallel plan, or {_WHOLE}"
        )
    if num_shards not in text.device_numbers:
        raise UserError(
            f"{name}: {num_shards} processes do not divide its query heads and its key and value heads; start "
            f"{' or '.join(map(str, text.device_numbers))} of them (--nproc-per-node), or {_WHOLE}"
        )
    return DistributedConfig(
        tp_size=num_shards, tp_plan={module: "replicate" for module in empty.tp_plan if module not in plan}
    )
