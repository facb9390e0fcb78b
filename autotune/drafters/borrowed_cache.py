"""The target's KV cache, as a draft reads it that has none of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import Tensor

from autotune.errors import UserError
from autotune.modeling.kv_cache import KVShape
from autotune.modeling.text_model import TextModel

if TYPE_CHECKING:
    from autotune.modeling.target import Target


class BorrowedCache:
    """Stands for the KV cache that a draft does not have, over the target's. ``length`` counts the tokens up to the root.

    Args:
        layer_types: types of the draft's layers; each reads the target's last layer of its type.

    Raises:
        UserError: the target has no layer of one of the types.
    """

    memory_bytes = 0

    def __init__(self, target: Target, layer_types: Collection[str]) -> None:
        self._target = target
        self.length = 0
        shared = {name: shared_layer(target.text, name) for name in sorted(set(layer_types))}
        self._numbers = {name: number for name, (number, _) in shared.items()}
        self.shapes: dict[str, KVShape] = {name: shape for name, (_, shape) in shared.items()}

    @property
    def capacity(self) -> int:
        return int(self._target.cache.capacity)

    def keys_values(self, layer_type: str, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The target's keys and values of a type of layer, [1, heads, end - begin, size] each."""
        layer, device = self._target.cache.layers[self._numbers[layer_type]], self._target.device
        return layer.keys[:, :, begin:end].to(device), layer.values[:, :, begin:end].to(device)

    def clear(self) -> None:
        """Forget the request; the target's tokens are its own."""
        self.length = 0

    release = clear


def shared_layer(text: TextModel, layer_type: str) -> tuple[int, KVShape]:
    """The target's last layer of a type that caches keys and values, which later layers and assistants read, and its shape.

    Raises:
        UserError: there is none.
    """
    for number in reversed(text.attending_layers):
        shape = text.kv_shapes[number]
        if text.layer_types[number] == layer_type and shape is not None:
            return number, shape
    raise UserError(
        f"an assistant with layers of type {layer_type} reads keys and values of such a layer; this target has none; use a draft "
        "made for this target"
    )
