"""Files of weights: written whole, and refused where some of a model's are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.files import write_bytes


def save_tensors(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file by ``write_bytes``: safetensors' own files are their owner's alone, and a killed process
    leaves parts.
    """
    from safetensors.torch import save

    write_bytes(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))


def check_weights(info: Mapping[str, Any], *, name: str) -> None:
    """Refuse weights that transformers made at random because the checkpoint lacks them, or has others."""
    for key, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape of")):
        if found := sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info[key]):
            raise UserError(
                f"{name}: its checkpoint {what} {len(found)} weights of the model, {', '.join(found[:3])}, which would be random; "
                "restore the file, or load another checkpoint"
            )
