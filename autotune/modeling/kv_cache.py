"""A preallocated KV cache that transformers models write to, and from which rejected tree nodes are dropped in
place.

Some layers of hybrid models keep a recurrent or convolution state in place of keys and values, or beside them. Keys and
values of rejected tokens are dropped; a state has absorbed them. Every forward pass whose tokens may be
rejected therefore begins with a copy of the states after the committed tokens, and keeps the inputs of the modules that
update them, the *mixers*. If some of the tokens are rejected, the copy is put back, and the mixers alone read the
accepted ones again: attention and feed-forward layers do not, and the head does not.

A state follows one path, so that chains can be verified, but no trees.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer

from autotune.modeling.host import select
from autotune.modeling.masks import first_visible
from autotune.modeling.text_model import STATE_TYPES, KVShape, TextModel, device_of


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
        if (slots := self.cache.slots) is not None:
            self.keys.index_copy_(2, slots, key_states)
            self.values.index_copy_(2, slots, value_states)
            return self.keys, self.values
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
    """Keys and values of all layers of a device with one shape in two slabs [layers, batch, kv heads, capacity, head
    dim], allocated at the first forward pass and kept between requests.

    A forward pass of n tokens writes after ``length`` committed and ``num_uncommitted`` other tokens and changes
    neither. The caller then commits all (``advance``) or some (``keep``) of the tokens.

    Args:
        windows: attention window of each layer; None sees everything.
        devices: device of each layer; None for a layer without keys and values.
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
        self.slots: Tensor | None = None
        """Where the tokens of a captured step are written, [n] (see ``graph_runner.py``); set during the step."""
        self.moves: list[int] | None = None
        """Where other processes hold parts of the same cache: what ``keep`` has moved and they have not; for each call
        the length, the number of slots and the slots.
        """
        self._slab_of = list(zip(devices, shapes or [None] * len(devices), strict=True))
        """Key of each layer's slabs."""
        self._slabs: dict[tuple[torch.device | None, KVShape | None], tuple[Tensor, Tensor]] = {}
        self._rows = torch.arange(0)  # of the latest slabs
        super().__init__(layers=[self._new_layer(index, window) for index, window in enumerate(windows)])

    def _new_layer(self, index: int, window: int | None) -> Any:
        return SlabLayer(self, index, window)

    @contextmanager
    def forward_pass(self, num_uncommitted: int, *, is_final: bool = False) -> Iterator[None]:
        """The context of a forward pass after the prefill, which sees ``num_uncommitted`` tokens of earlier steps of
        this round. ``is_final``: all of its tokens will be committed.
        """
        self.num_uncommitted = num_uncommitted
        try:
            yield
        finally:
            self.num_uncommitted = 0

    def allocate(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's views of the slabs. The layer calls this at its first update."""
        key = self._slab_of[layer]
        if key not in self._slabs:
            number = self._slab_of.count(key)
            self._slabs[key] = tuple(  # type: ignore[assignment]
                states.new_zeros(number, *states.shape[:2], self.capacity, states.shape[3]) for states in (keys, values)
            )
            self._rows = torch.arange(number, device=keys.device)
        key_slab, value_slab = self._slabs[key]
        row = self._slab_of[:layer].count(key)
        return key_slab[row], value_slab[row]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Captured steps of models with one pair of slabs write to the whole slabs, so that ``torch.compile`` takes the
        layer's number for an argument, and writes in place.
        """
        if self.slots is None or len(self._slabs) != 1 or len(self._rows) != len(self.layers):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]
        ((keys, values),) = self._slabs.values()
        row = self._rows.narrow(0, layer_idx, 1)
        keys[row, :, :, self.slots] = key_states.permute(2, 0, 1, 3)
        values[row, :, :, self.slots] = value_states.permute(2, 0, 1, 3)
        return keys.select(0, layer_idx), values.select(0, layer_idx)

    def insert_row(self, row: int, num_rows: int, source: SlabCache) -> None:
        """Copy the tokens of a cache with one row to a row of this one, which has ``num_rows``, so that they end at
        ``length``.
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
        self.length = self.num_uncommitted = 0

    def release(self) -> None:
        """Free the memory. The cache holds no tokens from here on."""
        self.clear()
        self.capacity = 0
        self._slabs.clear()
        self._rows = torch.arange(0)
        for layer in self.layers:
            layer.keys = layer.values = None

    def advance(self, num_tokens: int) -> None:
        """Commit the tokens of the last forward pass, in order."""
        self.length += num_tokens

    def keep(self, slots: list[int]) -> None:
        """Commit some of the tokens after ``length``, from which ``slots`` count in ascending order; drop the
        others.
        """
        if slots and slots != list(range(len(slots))):
            if self.moves is not None:
                self.moves += [self.length, len(slots), *slots]
            kept = np.array(slots) + self.length
            for slab in itertools.chain(*self._slabs.values()):
                slab[:, :, :, self.length : self.length + len(slots)] = select(slab, kept, 3)
        self.length += len(slots)


_Inputs = list[tuple[Tensor, dict[str, Any]]]


class _HybridLayer(LinearAttentionLayer, SlabLayer):  # type: ignore[misc]
    """A layer with a state beside keys and values."""

    def __init__(self, cache: SlabCache, index: int, window: int | None, number_of_states: int) -> None:
        SlabLayer.__init__(self, cache, index, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class HybridCache(SlabCache):
    """A ``SlabCache`` with states, of one row. Tokens are committed in order, from the first one."""

    def __init__(self, text: TextModel, capacity: int) -> None:
        self._layer_types, self._attending = text.layer_types, frozenset(text.attending_layers)
        self._num_states = int(getattr(text.config, "number_of_conv_states", 1))
        self._mixers = text.mixers
        self._inputs: dict[int, _Inputs] = {number: [] for number in self._mixers}
        """By layer, hidden states [1, n, hidden] and other arguments of the mixer in the passes after the copy."""
        self._num_read = 0  # tokens in the states after the copy
        self._copies: list[Tensor] = []
        self._is_copy_empty = True
        devices = [device_of(layer) if n in self._attending else None for n, layer in enumerate(text.layers)]
        super().__init__(text.layer_windows, devices, capacity, text.kv_shapes)
        self._state_layers: list[Any] = [self.layers[number] for number in self._mixers]

    def _new_layer(self, index: int, window: int | None) -> Any:
        attends, has_state = index in self._attending, self._layer_types[index] in STATE_TYPES
        if not has_state:
            return super()._new_layer(index, window) if attends else DummyLayer()
        if attends:
            return _HybridLayer(self, index, window, self._num_states)
        return LinearAttentionLayer(number_of_states=self._num_states)

    @contextmanager
    def forward_pass(self, num_uncommitted: int, *, is_final: bool = False) -> Iterator[None]:
        if num_uncommitted < self._num_read:  # what was not committed is evaluated anew
            self._read_again(num_uncommitted)
        elif num_uncommitted == 0 and not is_final:
            self._copy()
        if is_final:
            self._forget_inputs()
            with super().forward_pass(num_uncommitted):
                yield
            return
        thread = threading.get_ident()
        with ExitStack() as hooks:
            for number, mixer in self._mixers.items():
                hook = mixer.register_forward_pre_hook(partial(_record, self._inputs[number], thread), with_kwargs=True)
                hooks.callback(hook.remove)
            with super().forward_pass(num_uncommitted):
                try:
                    yield
                except BaseException:  # some layers have read the tokens, others have not
                    self._put_back()
                    self._forget_inputs()
                    raise
        hidden, _ = next(iter(self._inputs.values()))[-1]
        self._num_read += hidden.shape[1]

    def advance(self, num_tokens: int) -> None:
        super().advance(num_tokens)
        self._commit(num_tokens)

    def keep(self, slots: list[int]) -> None:
        assert slots == list(range(len(slots))), "a state follows one path"
        super().keep(slots)
        self._commit(len(slots))

    def clear(self) -> None:
        super().clear()
        self._forget_inputs()
        self._forget_states()

    def release(self) -> None:
        super().release()
        self._copies.clear()
        for layer in self._state_layers:
            layer.conv_states.clear()
            layer.recurrent_states.clear()

    @property
    def memory_bytes(self) -> int:
        states = sum(state.numel() * state.element_size() for state in (*self._states(), *self._copies))
        return super().memory_bytes + states

    def _commit(self, num_tokens: int) -> None:
        """Make the states those after the first ``num_tokens`` tokens since the copy."""
        if num_tokens < self._num_read:
            self._read_again(num_tokens)
        self._forget_inputs()

    def _forget_inputs(self) -> None:
        for inputs in self._inputs.values():
            inputs.clear()
        self._num_read = 0

    def _forget_states(self) -> None:
        """The next forward pass begins a sequence; it overwrites the memory."""
        for layer in self._state_layers:
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, False)

    def _states(self) -> list[Tensor]:
        return [
            state
            for layer in self._state_layers
            for states in (layer.conv_states, layer.recurrent_states)
            for state in states.values()
            if state is not None
        ]

    def _copy(self) -> None:
        states = self._states()
        self._is_copy_empty = not all(all(layer.has_previous_state.values()) for layer in self._state_layers)
        if len(self._copies) != len(states):
            self._copies = [torch.empty_like(state) for state in states]
        if states:
            torch._foreach_copy_(self._copies, states)

    def _put_back(self) -> None:
        if self._is_copy_empty:
            self._forget_states()
        else:
            torch._foreach_copy_(self._states(), self._copies)

    def _read_again(self, num_tokens: int) -> None:
        """Put the copy back, and let the mixers read the first tokens after it."""
        self._put_back()
        for number, mixer in self._mixers.items():
            inputs = self._inputs[number]
            hidden, options = torch.cat([part for part, _ in inputs], 1)[:, :num_tokens], inputs[-1][1]
            inputs.clear()
            if num_tokens > 0:
                mixer(hidden_states=hidden, **options)
                inputs.append((hidden, options))
        self._num_read = num_tokens


def _record(inputs: _Inputs, thread: int, _mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that keeps the arguments of a mixer in one thread; others may run the user's model meanwhile."""
    if threading.get_ident() != thread:
        return
    options = dict(kwargs)
    inputs.append((args[0] if args else options.pop("hidden_states"), options))


def new_cache(text: TextModel, capacity: int) -> SlabCache:
    """An empty cache for a text model, with a capacity in tokens."""
    if text.has_states:
        return HybridCache(text, capacity)
    return SlabCache(text.layer_windows, [device_of(layer) for layer in text.layers], capacity, text.kv_shapes)
