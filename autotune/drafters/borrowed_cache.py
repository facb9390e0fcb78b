"""The target's KV cache, as a draft reads it that has none of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import Tensor

from autotune.errors import UserError
from autotune.modeling.kv_cache import KVShape

if TYPE_CHECKING:
    from autotune.modeling.target import Target


class BorrowedCache:
    """Stands for the KV cache that a draft does not have, over the target's. ``length`` counts the tokens up to the root. Each
    layer of the draft, whose types are ``layer_types``, reads the target's last layer of its type.

    Raises:
        UserError: the target has no layer of one of the types.
    """

    memory_bytes = 0

    def __init__(self, target: Target, layer_types: Collection[str]) -> None:
        self._target = target
        self.length = 0
        text = target.text
        self._numbers: dict[str, int] = {}
        self.shapes: dict[str, KVShape] = {}
        for name in sorted(set(layer_types)):
            for number in text.attending_layers:
                if text.layer_types[number] == name and (shape := text.kv_shapes[number]) is not None:
                    self._numbers[name], self.shapes[name] = number, shape  # the last one stays
            if name not in self.shapes:
                raise UserError(
                    f"an assistant with layers of type {name} reads keys and values of such a layer; this target has none; use a "
                    "draft made for this target"
                )

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
