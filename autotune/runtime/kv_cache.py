"""A preallocated KV cache that transformers models write into, and from which rejected tree nodes are dropped in place."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from autotune.errors import UserError


class _SlabLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of the slab: appends behind the committed tokens, and shows everything up to there."""

    is_croppable = False

    def __init__(self, cache: SlabCache, index: int) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.cache = cache
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.keys, self.values = self.cache.allocate(self.index, key_states, value_states)
        assert self.keys is not None and self.values is not None
        begin = self.cache.length
        end = begin + key_states.shape[2]
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.capacity


class SlabCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers in two slabs [layers, batch, kv heads, capacity, head dim], allocated at the first
    forward.

    A forward of n tokens writes places ``length`` to ``length + n - 1`` and leaves ``length`` as it is: the caller then
    commits all (``advance``) or some (``keep``) of them. A request starts with ``clear``; the slabs stay.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._slabs: tuple[Tensor, Tensor] | None = None
        super().__init__(layers=[_SlabLayer(self, index) for index in range(num_layers)])

    def allocate(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The views of one layer, called by it at its first update.

        Raises:
            UserError: layers of different head counts or sizes.
        """
        if self._slabs is None:
            num_layers = len(self.layers)
            self._slabs = tuple(  # type: ignore[assignment]
                torch.zeros(
                    (num_layers, *states.shape[:2], self.capacity, states.shape[3]),
                    dtype=states.dtype,
                    device=states.device,
                )
                for states in (keys, values)
            )
        assert self._slabs is not None
        key_slab, value_slab = self._slabs
        if (*keys.shape[:2], keys.shape[3]) != (*key_slab.shape[1:3], key_slab.shape[4]):
            raise UserError(
                f"all layers must cache keys of one shape; layer {layer} has {tuple(keys.shape)}, the first {tuple(key_slab.shape[1:])}; "
                "this model cannot be decoded with trees yet"
            )
        return key_slab[layer], value_slab[layer]

    @property
    def memory_bytes(self) -> int:
        return 0 if self._slabs is None else sum(slab.numel() * slab.element_size() for slab in self._slabs)

    def clear(self) -> None:
        """Forget everything; the memory is kept for the next request."""
        self.length = 0

    def advance(self, num_tokens: int) -> None:
        """Commit the tokens of the last forward, in order."""
        self.length += num_tokens

    def keep(self, places: list[int]) -> None:
        """Commit some of the tokens just written: ``places`` count from ``length``, in ascending order. The others are
        forgotten.
        """
        if places and places != list(range(len(places))) and self._slabs is not None:
            source = torch.tensor(places, device=self._slabs[0].device) + self.length
            for slab in self._slabs:
                slab[:, :, :, self.length : self.length + len(places)] = slab.index_select(3, source)
        self.length += len(places)
