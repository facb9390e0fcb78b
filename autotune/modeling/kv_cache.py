"""A preallocated KV cache that transformers models write to, and from which rejected tree nodes are dropped in place."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from autotune.device import check_room, free_memory
from autotune.errors import UserError
from autotune.execution import EAGER
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.graph_runner import GraphKey, GraphRunner, KVSlots, check_mode, padded_length, rounded_capacity
from autotune.modeling.masks import MaskBuffer, TreeMask, first_visible, padded_masks
from autotune.modeling.step import DeviceStep, Step
from autotune.modeling.transfer import to_device
from autotune.trees.limits import Ints

KVShape = tuple[int, int]
"""Number of KV heads, and head size."""
MAX_DOUBLED_SHARE = 0.25  # of the free memory: a larger cache grows to what a request needs


class SlabLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of the slab. It shows attention all tokens up to the last one that its window reaches."""

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
        if (fixed := self.cache.fixed_slots) is not None:
            self.keys.index_copy_(2, fixed.slots, key_states)
            self.values.index_copy_(2, fixed.slots, value_states)
            return self.keys[:, :, : fixed.padded_kv_length], self.values[:, :, : fixed.padded_kv_length]
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
    """Keys and values of all layers of a device with one shape in two slabs [layers, batch, kv heads, capacity, head dim],
    allocated at the first forward pass and kept between requests.

    A forward pass of n tokens writes after ``length`` committed and ``num_uncommitted`` other tokens and changes neither.
    The caller then commits all (``advance``) or some (``keep``) of the tokens.

    Args:
        windows: attention window of each layer; None sees everything.
        devices: device of each layer; None for a layer without keys and values (see ``hybrid_cache.py``).
        capacity: in tokens.
        shapes: what tells layers with other numbers or sizes of heads apart, of each layer; None: all have one shape.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        devices: Sequence[torch.device | None],
        capacity: int,
        shapes: Sequence[KVShape | None] | None = None,
    ) -> None:
        self.capacity = capacity
        self.length = 0  # committed tokens
        self.num_uncommitted = 0  # tokens of earlier steps of this round that the next forward pass may see
        self.fixed_slots: KVSlots | None = None
        """Set during a forward pass over fixed buffers (see ``graph_runner.py``)."""
        self._slab_of = list(zip(devices, shapes or [None] * len(devices), strict=True))
        """Key of each layer's slabs."""
        self._slabs: dict[tuple[torch.device | None, KVShape | None], tuple[Tensor, Tensor]] = {}
        super().__init__(layers=[self._new_layer(index, window) for index, window in enumerate(windows)])

    def _new_layer(self, index: int, window: int | None) -> Any:
        return SlabLayer(self, index, window)

    @contextmanager
    def forward_pass(self, num_uncommitted: int, *, is_final: bool = False) -> Iterator[None]:
        """The context of a forward pass after the prefill.

        Args:
            num_uncommitted: tokens of earlier steps of this round that it sees.
            is_final: all of its tokens will be committed.
        """
        self.num_uncommitted = num_uncommitted
        try:
            yield
        finally:
            self.num_uncommitted = 0

    def allocate(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's views of the slabs. The layer calls this at its first update.

        Raises:
            UserError: layers with different head counts or sizes.
        """
        key = self._slab_of[layer]
        if key not in self._slabs:
            num_layers = self._slab_of.count(key)
            self._slabs[key] = tuple(  # type: ignore[assignment]
                torch.zeros(
                    (num_layers, *states.shape[:2], self.capacity, states.shape[3]),
                    dtype=states.dtype,
                    device=states.device,
                )
                for states in (keys, values)
            )
        key_slab, value_slab = self._slabs[key]
        for states, slab in ((keys, key_slab), (values, value_slab)):
            if (*states.shape[:2], states.shape[3]) != (*slab.shape[1:3], slab.shape[4]):
                raise UserError(
                    f"all layers must cache keys and values of one shape; layer {layer} has {tuple(states.shape)}, the first "
                    f"{tuple(slab.shape[1:])}: such a cache cannot be compacted; use another model"
                )
        row = self._slab_of[:layer].count(key)
        return key_slab[row], value_slab[row]

    def insert_row(self, row: int, num_rows: int, source: SlabCache) -> None:
        """Copy the tokens of a cache with one row to a row of this one, so that they end at ``length``.

        Args:
            num_rows: of this cache, in which a forward pass later evaluates tokens of all rows.
        """
        for key, slabs in source._slabs.items():
            if key not in self._slabs:
                self._slabs[key] = tuple(  # type: ignore[assignment]
                    slab.new_zeros(len(slab), num_rows, slab.shape[2], self.capacity, slab.shape[4]) for slab in slabs
                )
            for ours, theirs in zip(self._slabs[key], slabs, strict=True):
                ours[:, row, :, self.length - source.length : self.length] = theirs[:, 0, :, : source.length]

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all rows but some, whose tokens are copied."""
        for key, slabs in self._slabs.items():
            at = torch.tensor(rows, dtype=torch.long, device=slabs[0].device)
            self._slabs[key] = slabs[0].index_select(1, at), slabs[1].index_select(1, at)
        for layer in self.layers:
            layer.keys = layer.values = None  # they are views of the slabs

    @property
    def memory_bytes(self) -> int:
        return sum(slab.numel() * slab.element_size() for pair in self._slabs.values() for slab in pair)

    def clear(self) -> None:
        """Drop all tokens; the memory is kept for the next request."""
        self.length = 0
        self.num_uncommitted = 0

    def release(self) -> None:
        """Free the memory. The cache holds no tokens from here on."""
        self.clear()
        self.capacity = 0
        self._slabs.clear()
        for layer in self.layers:
            layer.keys = layer.values = None

    def advance(self, num_tokens: int) -> None:
        """Commit the tokens of the last forward pass, in order."""
        self.length += num_tokens

    def keep(self, slots: list[int]) -> None:
        """Commit some of the tokens after ``length``, from which ``slots`` count in ascending order; drop the others."""
        if slots and slots != list(range(len(slots))):
            for slabs in self._slabs.values():
                source = to_device(np.array(slots), slabs[0].device) + self.length
                for slab in slabs:
                    slab[:, :, :, self.length : self.length + len(slots)] = slab.index_select(3, source)
        self.length += len(slots)

    def compact(self, length: Tensor, slots: Tensor) -> None:
        """The device's part of ``keep``: move the tokens at ``slots`` directly after ``length``. How many of them are
        then committed does not matter.
        """
        destination = length + torch.arange(len(slots), device=slots.device)
        for slabs in self._slabs.values():
            for slab in slabs:
                moved = slab.index_select(3, (length + slots).to(slab.device))
                slab.index_copy_(3, destination.to(slab.device), moved)


class CachedModel(ABC):
    """A model with a KV cache and the masks over it. Both are reallocated when a request needs more capacity."""

    cache: Any
    device: torch.device
    dtype: torch.dtype
    graph_runner: GraphRunner | None = None  # runs forward passes after the prefill; None in mode ``eager``
    _masks: MaskBuffer

    @cached_property
    def _graph_runners(self) -> dict[str, GraphRunner]:
        return {}

    @cached_property
    def readers(self) -> weakref.WeakSet[GraphRunner]:
        """Graph runners whose captures refer to the memory of this cache."""
        return weakref.WeakSet()

    @property
    def position_axes(self) -> tuple[int, ...]:
        """Numbers of position axes that prompts may have."""
        return (1,)

    @property
    def num_devices(self) -> int:
        """Number of devices that the model is spread over."""
        return 1

    @property
    def has_states(self) -> bool:
        """Whether layers keep recurrent or convolution states, which follow one path."""
        return False

    @abstractmethod
    def _allocate(self, capacity: int) -> None:
        """Allocate a cache and masks for ``capacity`` tokens."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The model, for messages."""

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""

    @abstractmethod
    def _forward_over_buffers(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """The function that ``GraphRunner`` compiles or captures. Input ``integers`` [2 + axes, n] holds tokens, KV slots and
        positions.
        """

    @property
    @abstractmethod
    def prefix_state(self) -> Ints:
        """Numbers that locate the end of the prefix; the first one is the number of committed tokens."""

    def _run_captured(
        self,
        step: Step,
        positions: Ints,
        column_offsets: Ints,
        output_layers: tuple[int, ...] = (),
        further_masks: Mapping[str, TreeMask] | None = None,
        **values: Tensor | TreeMask,
    ) -> Outputs:
        """Run a step through the graph runner.

        Args:
            positions: [axes, n].
            column_offsets: offsets of the uncommitted tokens and the n tokens.
            output_layers: as in ``GraphKey``.
            further_masks: beside those of the layer types, padded as well.
            values: further inputs of ``_forward_over_buffers``.
        """
        assert self.graph_runner is not None
        begin = self.cache.length + step.num_uncommitted
        end = begin + len(step.tokens)
        key = GraphKey(len(step.tokens), output_layers, len(positions))
        masks = padded_masks(
            self._masks.windows,
            step.tree_mask,
            self.cache.length,
            step.offsets,
            column_offsets,
            padded_kv_length=padded_length(end, self.cache.capacity),
            mask_value=self.mask_value,
        )
        masks |= further_masks or {}
        integers = np.vstack([step.tokens, np.arange(begin, end), positions])
        inputs = {"integers": integers, **values, **masks}
        outputs = self.graph_runner.run(self._forward_over_buffers, key, inputs, self.dtype, padded=masks)
        return tuple(output.clone() for output in outputs)  # the buffers are valid only until the next forward pass

    def _run_on_device(
        self,
        step: DeviceStep,
        positions: Tensor,
        output_layers: tuple[int, ...] = (),
        further_masks: Mapping[str, Tensor] | None = None,
        **values: Tensor,
    ) -> Outputs:
        """Run a step inside a larger function that is compiled or captured as a whole, the forward pass with it."""
        assert self.graph_runner is not None
        integers = torch.cat([torch.stack([step.tokens, step.kv_slots]), positions])
        masks = step.masks(self._masks.windows, mask_value=self.mask_value) | dict(further_masks or {})
        inputs = {"integers": integers, **values, **masks}
        if self.graph_runner.mode != "fixed":
            return self._forward_over_buffers(inputs)
        key = GraphKey(len(step.tokens), output_layers, len(positions))
        return self.graph_runner.run(self._forward_over_buffers, key, inputs, self.dtype, padded=masks)

    @property
    def mode(self) -> str:
        """How forward passes after the prefill run (``autotune.execution.MODES``)."""
        return EAGER if self.graph_runner is None else self.graph_runner.mode

    def check_mode(self, name: str) -> str:
        """See ``graph_runner.check_mode``."""
        return check_mode(name, self.device, self.num_devices, has_states=self.has_states)

    def use_mode(self, name: str) -> None:
        """Set ``mode``. Captures of other modes are kept.

        Raises:
            UserError: a mode that is unknown or not available on this device.
        """
        if name == EAGER:
            self.graph_runner = None
            return
        if name not in self._graph_runners:
            self.check_mode(name)
            runner = self._graph_runners[name] = GraphRunner(name, self.device, description=self.description)
            self.readers.add(runner)
        self.graph_runner = self._graph_runners[name]

    def __del__(self) -> None:
        # A cache and its layers refer to each other, so that its memory would wait for the cycle collector.
        if (cache := getattr(self, "cache", None)) is not None:
            cache.release()

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""
        return int(self.cache.length)

    @property
    def mask_value(self) -> float:
        """The mask's value for hidden tokens."""
        return self._masks.mask_value

    def reserve(self, num_tokens: int) -> None:
        """Empty the cache and give it room for ``num_tokens`` tokens.

        Raises:
            UserError: not enough memory.
        """
        if num_tokens > self.cache.capacity:
            self._grow(num_tokens)
        self.cache.clear()

    def _grow(self, num_tokens: int) -> None:
        """Replace cache and captures. Where forward passes are captured, the capacity is doubled if there is room, because
        a request that needs more captures all of them anew.
        """
        capacity = rounded_capacity(num_tokens)
        needs = {"cache": self.kv_bytes_per_token * num_tokens}
        freed = self.cache.memory_bytes
        what, advice = f"a sequence of {num_tokens} tokens", "shorten the prompt, or lower max_new_tokens"
        check_room(self.device, needs, what=what, advice=advice, freed=freed)
        if self.graph_runner is not None:
            doubled = padded_length(num_tokens, 2 * capacity)
            if self.kv_bytes_per_token * doubled <= MAX_DOUBLED_SHARE * (free_memory(self.device) + freed):
                capacity = doubled
        for runner in self.readers:
            runner.reset()
        self.cache.release()  # first, or both would be in memory
        self._allocate(capacity)
