"""A preallocated KV cache that transformers models write into, and from which rejected tree nodes are dropped in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from autotune.device import check_room
from autotune.errors import UserError
from autotune.execution import EAGER
from autotune.modeling.graph_runner import KV_LENGTH_STEP, GraphKey, GraphRunner, Outputs, Slots
from autotune.modeling.masks import MaskBuffer, first_visible
from autotune.modeling.transfer import to_device
from autotune.trees.tree import Ints


class _SlabLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of the slab: appends behind the committed tokens, and shows everything up to there that its
    window reaches.
    """

    is_croppable = False

    def __init__(self, cache: SlabCache, index: int, window: int | None) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.cache = cache
        self.index = index
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.keys, self.values = self.cache.allocate(self.index, key_states, value_states)
        assert self.keys is not None and self.values is not None
        if (slots := self.cache.slots) is not None:
            self.keys.index_copy_(2, slots.columns, key_states)
            self.values.index_copy_(2, slots.columns, value_states)
            return self.keys[:, :, : slots.padded_kv_length], self.values[:, :, : slots.padded_kv_length]
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        first = self._first
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    @property
    def _first(self) -> int:
        return first_visible(self.cache.length, self.window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() - self._first + query_length, self._first

    def get_seq_length(self) -> int:
        return self.cache.length + self.cache.num_uncommitted

    def get_max_length(self) -> int:
        return self.cache.capacity


class SlabCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers of a device in two slabs [layers, batch, kv heads, capacity, head dim], allocated at
    the first forward.

    A forward of n tokens writes behind ``length`` committed and ``num_uncommitted`` other tokens, and changes neither:
    the caller then commits all (``advance``) or some (``keep``) of them. A request starts with ``clear``; the slabs
    stay.

    Args:
        windows: of each layer; None sees everything.
        devices: of each layer.
        capacity: in tokens.
    """

    def __init__(self, windows: Sequence[int | None], devices: Sequence[torch.device], capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.num_uncommitted = 0
        """Tokens written earlier this round, behind the committed ones, that the next forward may see."""
        self.slots: Slots | None = None
        """Of a prepared forward, while it runs (``graphs.py``)."""
        self._devices = list(devices)
        self._slabs: dict[torch.device, tuple[Tensor, Tensor]] = {}
        super().__init__(layers=[_SlabLayer(self, index, window) for index, window in enumerate(windows)])

    def allocate(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The views of one layer, called by it at its first update.

        Raises:
            UserError: layers of different head counts or sizes.
        """
        device = self._devices[layer]
        if device not in self._slabs:
            num_layers = self._devices.count(device)
            self._slabs[device] = tuple(  # type: ignore[assignment]
                torch.zeros(
                    (num_layers, *states.shape[:2], self.capacity, states.shape[3]),
                    dtype=states.dtype,
                    device=states.device,
                )
                for states in (keys, values)
            )
        key_slab, value_slab = self._slabs[device]
        for states, slab in ((keys, key_slab), (values, value_slab)):
            if (*states.shape[:2], states.shape[3]) != (*slab.shape[1:3], slab.shape[4]):
                raise UserError(
                    f"all layers must cache keys and values of one shape; layer {layer} has {tuple(states.shape)}, the first "
                    f"{tuple(slab.shape[1:])}: such a cache cannot be compacted; use another model"
                )
        row = self._devices[:layer].count(device)
        return key_slab[row], value_slab[row]

    @property
    def memory_bytes(self) -> int:
        return sum(slab.numel() * slab.element_size() for pair in self._slabs.values() for slab in pair)

    def clear(self) -> None:
        """Forget everything; the memory is kept for the next request."""
        self.length = 0
        self.num_uncommitted = 0

    def advance(self, num_tokens: int) -> None:
        """Commit the tokens of the last forward, in order."""
        self.length += num_tokens

    def keep(self, offsets: list[int]) -> None:
        """Commit some of the tokens written behind ``length``, from which ``offsets`` count, in ascending order. The
        others are forgotten.
        """
        if offsets and offsets != list(range(len(offsets))):
            for slabs in self._slabs.values():
                source = to_device(np.array(offsets), slabs[0].device) + self.length
                for slab in slabs:
                    slab[:, :, :, self.length : self.length + len(offsets)] = slab.index_select(3, source)
        self.length += len(offsets)

    def compact(self, length: Tensor, offsets: Tensor) -> None:
        """The device's part of ``keep``: as many columns as there are ``offsets`` are brought together behind ``length``,
        whether they are then committed or not.
        """
        goal = length + torch.arange(len(offsets), device=offsets.device)
        for device, slabs in self._slabs.items():
            for slab in slabs:
                found = slab.index_select(3, (length + offsets).to(device))
                slab.index_copy_(3, goal.to(device), found)


class CachedModel(ABC):
    """A model that keeps a cache and the masks over it; both grow when a request needs more room."""

    cache: Any
    device: torch.device
    dtype: torch.dtype
    graph_runner: GraphRunner | None = None
    """Runs forward passes after the prefill; None in mode ``eager``."""
    _masks: MaskBuffer

    @abstractmethod
    def _allocate(self, capacity: int) -> None:
        """Make a cache and masks for that many tokens."""

    @property
    @abstractmethod
    def what(self) -> str:
        """For messages."""

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """What a token takes in the cache."""

    @abstractmethod
    def _prepared_forward(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """A forward over prepared buffers."""

    @property
    @abstractmethod
    def prefix_state(self) -> Ints:
        """Where the committed tokens end: their number comes first."""

    def run_within(self, size: GraphKey, values: Mapping[str, Tensor]) -> Outputs:
        """A prepared forward as a part of work that is prepared as a whole: a graph takes it in as it is, a compiled one
        stays compiled.
        """
        assert self.graph_runner is not None
        if self.graph_runner.mode == "cuda-graph":
            return self._prepared_forward(values)
        return self.graph_runner.run(size, values, self.dtype)

    @cached_property
    def _prepared_by(self) -> dict[str, GraphRunner]:
        return {}

    @property
    def mode(self) -> str:
        """How forward passes after the prefill run (``autotune.execution.MODES``)."""
        return EAGER if self.graph_runner is None else self.graph_runner.mode

    def use_mode(self, name: str) -> None:
        """How forwards behind the prefill run from now on (``graphs.MODES``); what was prepared before is kept.

        Raises:
            UserError: a runner that does not run here.
        """
        if name == EAGER:
            self.graph_runner = None
            return
        if name not in self._prepared_by:
            self._prepared_by[name] = GraphRunner(name, self._prepared_forward, self.device, what=self.what)
        self.graph_runner = self._prepared_by[name]

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""
        return int(self.cache.length)

    @property
    def mask_value(self) -> float:
        """What a mask adds where a token must not look."""
        return self._masks.mask_value

    def reserve(self, num_tokens: int) -> None:
        """Empty the cache and make sure that it holds that many tokens.

        Raises:
            UserError: more than there is memory for.
        """
        if num_tokens > self.cache.capacity:
            check_room(
                self.device,
                {"cache": self.kv_bytes_per_token * num_tokens},
                what=f"a sequence of {num_tokens} tokens",
                advice="shorten the prompt, or lower max_new_tokens",
                freed=self.cache.memory_bytes,
            )
            self._allocate(-(-num_tokens // KV_LENGTH_STEP) * KV_LENGTH_STEP)
            for prepared in self._prepared_by.values():
                prepared.forget()
        self.cache.clear()
