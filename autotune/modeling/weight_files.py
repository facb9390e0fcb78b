"""Files of models: written whole, and refused in one line where they are damaged or weights are not finite."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError, first_line
from autotune.files import write_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

FILES_ADVICE = "check the name or path, and its files"
CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"


@contextmanager
def load_errors(name: str, advice: str = FILES_ADVICE) -> Iterator[None]:
    """Turn errors of transformers and safetensors, which raise anything for damaged files, into one line."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ is not None else error
        line = next(iter(str(reason).strip().splitlines()), type(reason).__name__)
        raise UserError(f"{name:.200}: transformers cannot load it ({line[:300]}); {advice}") from None


def check_whole(path: Path) -> None:
    """Refuse a file that is not there, or a safetensors file that ends before a tensor does, by the tensor's name.
    Other damage is left to safetensors.
    """
    if not path.exists():
        raise UserError(f"{path}: the index of the weights names this file, which is not there; download it again")
    end = path.stat().st_size
    with suppress(ValueError, LookupError, TypeError, AttributeError), path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        for name, entry in json.loads(file.read(min(begin, end) - 8)).items():
            if name != "__metadata__" and begin + entry["data_offsets"][1] > end:
                raise UserError(f"{path}: truncated in the weights {name}; restore the file, or download it again")


def check_finite(tensors: Mapping[str, Any], *, source: object) -> None:
    """Refuse weights that are not finite, of which every answer would be one token over and over."""
    import torch

    for name, tensor in tensors.items():
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # not the packed weights of torchao
        if not is_plain or tensor.is_meta or not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            continue
        if not bool(tensor.sum(dtype=torch.float32).isfinite()):  # one pass without a copy
            raise UserError(
                f"{source}: the weights {name} are not finite; restore the file, or load another checkpoint"
            )


def save_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write a safetensors file by ``write_bytes``: safetensors' own files are their owner's alone, and a killed process
    leaves parts.
    """
    from safetensors.torch import save

    write_bytes(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def save_content(path: Path, content: Mapping[str, Any]) -> None:
    """Write what ``torch.load`` reads without running code, by ``write_bytes``."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


def check_weights(model: Any, info: Mapping[str, Any], *, name: str) -> None:
    """Refuse weights that transformers made at random because the checkpoint lacks them, or has others."""
    for key, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape of")):
        if found := sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info[key]):
            raise UserError(
                f"{name}: its checkpoint {what} {len(found)} weights of the model, {', '.join(found[:3])}, which would be random; "
                "restore the file, or load another checkpoint"
            )
    check_finite(dict(model.named_parameters()), source=name)


def read_tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    """The tensors of a published draft; ``kind`` names it in messages. No code of a pickle is run.

    Raises:
        UserError: no file of weights, or one of which no tensors can be read.
    """
    from transformers.modeling_utils import load_state_dict

    path = folder / WEIGHTS if (folder / WEIGHTS).exists() else folder / PICKLED
    if not path.exists():
        raise UserError(
            f"{folder}: {kind} is read from {WEIGHTS} or {PICKLED}; there is none; give the folder of a whole draft"
        )
    check_whole(path)
    try:
        return load_state_dict(path)
    except Exception as error:  # both libraries raise many kinds for damaged files
        raise UserError(
            f"{path}: no tensors can be read from it ({first_line(error)}); restore the file, or save them as {WEIGHTS}"
        ) from None


def set_weights(network: nn.Module, tensors: Mapping[str, Tensor], *, source: object, what: str, advice: str) -> None:
    """Take tensors for all weights of a network, which may be on the device ``meta``. Messages name the weights'
    ``source``, ``what`` they are for, and the next step.

    Raises:
        UserError: missing or other tensors, tensors of other shapes, or weights that are not finite.
    """
    try:
        network.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{source}: not the tensors of {what} ({reason}); {advice}") from None
    check_finite(tensors, source=source)
