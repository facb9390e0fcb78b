"""Forward passes over fixed buffers, compiled by torch or captured as CUDA graphs.

An eager forward pass shows attention the KV cache up to its last token, so its shapes change with every token. A CUDA
graph needs the same shapes at the same addresses each time. A forward pass of n tokens therefore

* reads its inputs from buffers that are allocated once,
* attends to a *padded KV length*, the next multiple of 256 tokens, in which its mask hides what has not been written,
* writes keys and values at cache indices (*KV slots*) that it reads from a buffer.

All forward passes with the same n and padded KV length then share one ``CapturedForward``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.errors import UserError
from autotune.execution import MODES

KV_LENGTH_STEP = 256
"""Cache capacities and padded KV lengths are multiples of this number of tokens."""
WARM_UPS = 2  # runs before a capture, because libraries initialize themselves in the first one

Values = Mapping[str, NDArray[Any] | Tensor]
Outputs = tuple[Tensor, ...]
Function = Callable[[Mapping[str, Tensor]], Outputs]
"""Maps named buffers to tensors."""


class KVSlots(NamedTuple):
    """Where a forward pass over fixed buffers writes to the KV cache, and how much of the cache it reads."""

    slots: Tensor  # index in the cache of each token, [n]
    padded_kv_length: int


@dataclass(frozen=True)
class GraphKey:
    """Forward passes with equal keys share one capture."""

    num_tokens: int
    padded_kv_length: int
    output_layers: tuple[int, ...] = ()
    padded_crossing_length: int | None = None
    """As in ``DeviceStep``."""


class EagerNotice(UserWarning):
    """A forward pass could not be compiled or captured and runs eagerly."""


class CapturedForward:
    """A compiled or captured forward pass. Its outputs are valid until it runs again."""

    def __init__(self, run: Callable[[], Outputs], inputs: Mapping[str, Tensor]) -> None:
        self._run = run
        self.inputs = inputs

    def __call__(self, values: Values) -> Outputs:
        """Copy the values into the buffers and run."""
        _fill(self.inputs, values)
        return self._run()


class GraphRunner:
    """The captured forward passes of one model, each captured on first use.

    Args:
        mode: ``fixed``, ``compile`` or ``cuda-graph``.
        function: the forward pass.
        device: where the buffers are allocated.
        description: what is run, for messages.

    Raises:
        UserError: a mode that is unknown or not available on this device.
    """

    def __init__(self, mode: str, function: Function, device: torch.device, *, description: str) -> None:
        self.mode = check_mode(mode, device)
        self.device = device
        self.description = description
        self.memory_bytes = 0  # memory of the buffers and captures
        self.why_eager: str | None = None
        """The error of the first failed capture. After it, all forward passes run eagerly over the same buffers."""
        self._function = function
        self._memory_pool: Any = None
        self._captured: dict[Hashable, CapturedForward] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def reset(self) -> None:
        """Drop all captures, because the memory that they refer to was reallocated."""
        self._captured.clear()
        self._memory_pool, self.memory_bytes = None, 0

    def run(self, key: Hashable, values: Values, dtype: torch.dtype) -> Outputs:
        """Run a forward pass, capturing it if needed. Floating-point arrays are copied as ``dtype``; integer arrays and
        tensors keep their type.
        """
        if key not in self._captured:
            self._captured[key] = self._capture(values, dtype)
        return self._captured[key](values)

    def _capture(self, values: Values, dtype: torch.dtype) -> CapturedForward:
        reserved = self._reserved_bytes()
        inputs = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                buffer_dtype = value.dtype
            else:
                buffer_dtype = dtype if np.issubdtype(value.dtype, np.floating) else torch.long
            inputs[name] = torch.empty(value.shape, dtype=buffer_dtype, device=self.device)
        _fill(inputs, values)  # compiling and capturing run the function, so its inputs must be valid
        run = self._compile_or_capture(inputs)
        buffers = sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())
        self.memory_bytes += max(buffers, self._reserved_bytes() - reserved)
        return CapturedForward(run, inputs)

    def _compile_or_capture(self, inputs: Mapping[str, Tensor]) -> Callable[[], Outputs]:
        function = self._function
        if self.why_eager is None and self.mode != "fixed":
            try:
                return self._capture_graph(inputs) if self.mode == "cuda-graph" else self._compile(inputs)
            except Exception as error:
                lines = str(error).strip().splitlines()
                self.why_eager = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
                warnings.warn(
                    f"{self.description} cannot run in mode {self.mode} ({self.why_eager}); it runs eagerly",
                    EagerNotice,
                    stacklevel=2,
                )
        return lambda: function(inputs)

    def _compile(self, inputs: Mapping[str, Tensor]) -> Callable[[], Outputs]:
        """Compile for these shapes only, and now, so that no timed round includes the compilation."""
        compiled = torch.compile(_with_own_code(self._function), dynamic=False)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            compiled(inputs)
        return lambda: compiled(inputs)

    def _capture_graph(self, inputs: Mapping[str, Tensor]) -> Callable[[], Outputs]:
        """Capture on a side stream; all captures share one memory pool."""
        function, stream = self._function, torch.cuda.current_stream(self.device)
        side_stream = torch.cuda.Stream(self.device)
        side_stream.wait_stream(stream)
        with torch.cuda.stream(side_stream):
            for _ in range(WARM_UPS):
                function(inputs)
        stream.wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool):
            outputs = function(inputs)
        self._memory_pool = self._memory_pool or graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0


def check_mode(name: str, device: torch.device) -> str:
    """Return the mode if it is available on this device.

    Raises:
        UserError: an unknown mode, or CUDA graphs without CUDA.
    """
    if name not in MODES:
        raise UserError(f"mode must be {', '.join(MODES)}; got {name!r}; choose one of these")
    if name == "cuda-graph" and device.type != "cuda":
        raise UserError(f"mode cuda-graph needs a CUDA device; the model is on {device}; choose eager or compile")
    return name


def padded_length(num_tokens: int) -> int:
    """KV length rounded up to a multiple of ``KV_LENGTH_STEP``."""
    return -(-num_tokens // KV_LENGTH_STEP) * KV_LENGTH_STEP


def _with_own_code(function: Function) -> Function:
    """The same function with a code object of its own. Dynamo stores compilations per code object, searches them linearly
    at every call, and silently stops compiling after a few (``recompile_limit``).
    """

    def run(inputs: Mapping[str, Tensor]) -> Outputs:
        return function(inputs)

    return FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)


def _fill(inputs: Mapping[str, Tensor], values: Values) -> None:
    for name, value in values.items():
        # No synchronization is needed: pageable host memory is staged before the call returns.
        inputs[name].copy_(torch.from_numpy(value) if isinstance(value, np.ndarray) else value, non_blocking=True)
