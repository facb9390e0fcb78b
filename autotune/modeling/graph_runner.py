"""Forward passes over fixed buffers, compiled by torch, captured as CUDA graphs, or both.

An eager forward pass shows attention the KV cache up to its last token, so its shapes change with every token. A CUDA
graph needs the same shapes at the same addresses each time. A forward pass of n tokens therefore

* reads its inputs from buffers that are allocated once,
* attends to a *padded KV length*, 256 tokens doubled until it suffices, in which its mask hides what has not been written,
* writes keys and values at cache indices (*KV slots*) that it reads from a buffer.

All forward passes with the same n and padded KV length then share one ``CapturedForward``. Lengths are doubled, because every
one of them is captured: a context of 8,192 tokens has six. Compiled code is shared by all lengths: a function reads the padded
lengths from the shapes of its inputs, and the compiler keeps these symbolic.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.errors import UserError
from autotune.execution import AUTO, EAGER, MODES, is_captured, without_flex_attention
from autotune.modeling.graph_memory import CapturedForward, Outputs, graph_memory

KV_LENGTH_STEP = 256
"""The shortest padded KV length; cache capacities are multiples of it."""

Values = Mapping[str, NDArray[Any] | Tensor]
Function = Callable[[Mapping[str, Tensor]], Outputs]
"""Maps named buffers to tensors. It may depend on its key and on the shapes of the buffers, on no other value of the host."""
Sequel = Callable[[Mapping[str, Tensor], Outputs], None]
"""Work that follows a function, from its inputs and outputs; captured with it, but not compiled."""


class KVSlots(NamedTuple):
    """Where a forward pass over fixed buffers writes to the KV cache, and how much of the cache it reads."""

    slots: Tensor  # index in the cache of each token, [n]
    padded_kv_length: int


@dataclass(frozen=True)
class GraphKey:
    """Forward passes with equal keys, and equal padded KV lengths, share one capture."""

    num_tokens: int
    output_layers: tuple[int, ...] = ()
    num_axes: int = 1
    """Position axes: images give some models three."""


class EagerNotice(UserWarning):
    """A forward pass could not be compiled or captured and runs eagerly."""


class GraphRunner:
    """The prepared forward passes of one function, each prepared on first use. It holds no reference to the function, so
    that models and their memory are freed as soon as they are dropped.

    Args:
        mode: any but ``eager``. On a GPU compiled work is captured too.
        device: where the buffers are allocated.
        description: what is run, for messages.

    Raises:
        UserError: a mode that is unknown or not available on this device.
    """

    def __init__(self, mode: str, device: torch.device, *, description: str) -> None:
        self.mode = check_mode(mode, device)
        self.device = device
        self.description = description
        self.why_eager: str | None = None
        """The error of the first failed capture. After it, all forward passes run eagerly over the same buffers."""
        self._captured: dict[Hashable, CapturedForward] = {}
        self._compiled: dict[Hashable, Callable[[Function, Mapping[str, Tensor]], Outputs]] = {}

    def __len__(self) -> int:
        return sum(not forward.is_dropped for forward in self._captured.values())

    @property
    def memory_bytes(self) -> int:
        """Memory of the input buffers."""
        return sum(forward.memory_bytes for forward in self._captured.values())

    def reset(self) -> None:
        """Drop all captures, because the memory that they refer to is reallocated."""
        for forward in self._captured.values():
            forward.drop()
        self._captured.clear()
        self._compiled.clear()

    def run(
        self,
        function: Function,
        key: Hashable,
        values: Values,
        dtype: torch.dtype,
        *,
        padded: Collection[str] = (),
        sequel: Sequel | None = None,
    ) -> Outputs:
        """Run a forward pass, preparing it if needed. Floating-point arrays are copied as ``dtype``; integer arrays and
        tensors keep their type. The outputs are overwritten when another forward pass of the device runs
        (``CapturedForward``).

        Args:
            padded: inputs whose last dimension is a padded KV length. Other shapes are those of the key.
        """
        capture_key = key, tuple(values[name].shape[-1] for name in padded)
        forward = self._captured.get(capture_key)
        if forward is None or forward.is_dropped:
            forward = self._captured[capture_key] = self._prepare(function, key, sequel, values, dtype, padded)
        fill(forward.inputs, values)
        if self.runs_eagerly:
            return _in_turn(function, sequel, forward.inputs)
        return forward()

    @property
    def runs_eagerly(self) -> bool:
        return self.is_fixed or self.why_eager is not None

    @property
    def is_fixed(self) -> bool:
        """Whether its forward passes are neither compiled nor captured."""
        return without_flex_attention(self.mode) == "fixed"

    def _prepare(
        self,
        function: Function,
        key: Hashable,
        sequel: Sequel | None,
        values: Values,
        dtype: torch.dtype,
        padded: Collection[str],
    ) -> CapturedForward:
        inputs = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                buffer_dtype = value.dtype
            else:
                buffer_dtype = dtype if np.issubdtype(value.dtype, np.floating) else torch.long
            inputs[name] = torch.empty(value.shape, dtype=buffer_dtype, device=self.device)
        fill(inputs, values)  # compiling and capturing run the function, so its inputs must be valid
        run: Callable[[], Outputs] = tuple  # never called where forward passes run eagerly
        if not self.runs_eagerly:
            try:
                is_compiled = without_flex_attention(self.mode) == "compile"
                work = self._compile(function, key, inputs, padded) if is_compiled else function
                run = functools.partial(_in_turn, work, sequel, inputs)
                if is_captured(self.mode, self.device.type):
                    run = graph_memory(self.device).capture(run)
            except Exception as error:
                lines = str(error).strip().splitlines()
                self.why_eager = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
                warnings.warn(
                    f"{self.description} cannot run in mode {self.mode} ({self.why_eager}); it runs eagerly",
                    EagerNotice,
                    stacklevel=2,
                )
        return graph_memory(self.device).keep(CapturedForward(run, inputs))

    def _compile(
        self, function: Function, key: Hashable, inputs: Mapping[str, Tensor], padded: Collection[str]
    ) -> Function:
        """Compile for this key and all padded KV lengths, and now, so that no timed round includes the compilation."""
        for name in padded:
            torch._dynamo.maybe_mark_dynamic(inputs[name], inputs[name].dim() - 1)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(_new_call(), dynamic=False)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            self._compiled[key](function, inputs)
        return functools.partial(self._compiled[key], function)


def check_mode(name: str, device: torch.device, num_devices: int = 1, *, has_states: bool = False) -> str:
    """Return the mode if it is available on this device; of ``auto``, ``cuda-graph`` for a model on one CUDA device, else
    ``eager``.

    Args:
        num_devices: over which the model is spread.
        has_states: it keeps recurrent or convolution states, which forward passes over static buffers cannot take back.

    Raises:
        UserError: an unknown mode, CUDA graphs without CUDA, or any mode but eager for a model on several devices.
    """
    if name == AUTO:
        return "cuda-graph" if device.type == "cuda" and num_devices == 1 and not has_states else EAGER
    if name not in MODES:
        raise UserError(f"mode must be {', '.join(MODES)}; got {name!r}; choose one of these")
    if name != EAGER and has_states:
        raise UserError(
            f"mode {name} cannot take back the recurrent or convolution states of a hybrid model; choose eager"
        )
    if name != EAGER and num_devices > 1:
        raise UserError(
            f"mode {name} needs a model on one device; it is spread over {num_devices}; choose eager, or load it on one device"
        )
    if without_flex_attention(name) == "cuda-graph" and device.type != "cuda":
        raise UserError(f"mode {name} needs a CUDA device; the model is on {device}; choose eager or compile")
    return name


def rounded_capacity(num_tokens: int) -> int:
    """Cache capacity: ``num_tokens`` rounded up to a multiple of ``KV_LENGTH_STEP``."""
    return -(-num_tokens // KV_LENGTH_STEP) * KV_LENGTH_STEP


def padded_length(num_tokens: int, capacity: int) -> int:
    """KV length padded to ``KV_LENGTH_STEP`` tokens, doubled until they suffice, but no more than the cache has."""
    length = KV_LENGTH_STEP
    while length < num_tokens:
        length *= 2
    return min(length, capacity)


def padded_lengths(capacity: int) -> list[int]:
    """All padded KV lengths of a cache, ascending."""
    lengths = [padded_length(1, capacity)]
    while lengths[-1] < capacity:
        lengths.append(padded_length(lengths[-1] + 1, capacity))
    return lengths


def _in_turn(function: Function, sequel: Sequel | None, inputs: Mapping[str, Tensor]) -> Outputs:
    outputs = function(inputs)
    if sequel is not None:
        sequel(inputs, outputs)
    return outputs


def _call(function: Function, inputs: Mapping[str, Tensor]) -> Outputs:
    return function(inputs)


def _new_call() -> Callable[[Function, Mapping[str, Tensor]], Outputs]:
    """``_call`` with a code object of its own. Dynamo stores compilations per code object, searches them linearly at every call,
    and silently stops compiling after a few (``recompile_limit``).
    """
    return FunctionType(_call.__code__.replace(), _call.__globals__)


def fill(inputs: Mapping[str, Tensor], values: Values) -> None:
    for name, value in values.items():
        # No synchronization is needed: pageable host memory is staged before the call returns.
        inputs[name].copy_(torch.from_numpy(value) if isinstance(value, np.ndarray) else value, non_blocking=True)
