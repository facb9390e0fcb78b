"""The cache of hybrid models, of which some layers keep a recurrent or convolution state in place of keys and values,
or beside them.

Keys and values of rejected tokens are dropped; a state has absorbed them. Every forward pass whose tokens may be
rejected therefore begins with a copy of the states after the committed tokens, and keeps the inputs of the modules that
update them, the *mixers*. If some of the tokens are rejected, the copy is put back, and the mixers alone read the
accepted ones again: attention and feed-forward layers do not, and the head does not.

A state follows one path, so that chains can be verified, but no trees.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

from autotune.modeling.kv_cache import SlabCache, SlabLayer
from autotune.modeling.text_model import STATE_TYPES, TextModel, device_of

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
