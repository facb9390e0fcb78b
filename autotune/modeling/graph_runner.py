"""Forward passes over fixed buffers, captured as CUDA graphs.

An eager forward pass shows attention the KV cache up to its last token, so its shapes change with every token. A CUDA
graph needs the same shapes at the same addresses each time. A forward pass of n tokens therefore

* reads its inputs from buffers that are allocated once,
* attends to a *padded KV length*, 256 tokens doubled until it suffices, in which its mask hides what has not been
  written,
* writes keys and values at cache indices (*KV slots*) that it reads from a buffer.

All forward passes with the same n and padded KV length then share one ``CapturedForward``. Lengths are doubled, because
every one of them is captured: a context of 8,192 tokens has six.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.errors import UserError
from autotune.execution import AUTO, CUDA_GRAPH, EAGER, FIXED, MODES
from autotune.modeling.graph_memory import CapturedForward, Outputs, graph_memory

Values = Mapping[str, NDArray[Any] | Tensor]
Function = Callable[[Mapping[str, Tensor]], Outputs]
"""Maps named buffers to tensors. It may depend on its key and on the shapes of the buffers, on no other value of the
host.
"""


class KVSlots(NamedTuple):
    """Where a forward pass over fixed buffers writes to the KV cache, and how much of the cache it reads."""

    slots: Tensor  # index in the cache of each token, [n]
    padded_kv_length: int


@dataclass(frozen=True)
class GraphKey:
    """Forward passes with equal keys share one capture."""

    num_tokens: int
    kv_lengths: tuple[int, ...]
    """Padded KV length of all layers; a second one for the blocks of a draft that cross, where it is another."""
    num_columns: int = 0
    """Padded number of columns of the tree mask."""
    num_rows: int = 1
    """Integers of each token besides the token and its offset: three position axes for images with some models."""
    output_layers: tuple[int, ...] = ()


class EagerNotice(UserWarning):
    """A forward pass could not be captured and runs eagerly."""


class GraphRunner:
    """The prepared forward passes of one function, each prepared on first use. It holds no reference to the function,
    so that models and their memory are freed as soon as they are dropped. ``mode`` is any but ``eager``.
    """

    def __init__(self, mode: str, device: torch.device, *, description: str) -> None:
        self.mode = check_mode(mode, device)
        self.device = device
        self.description = description
        self.why_eager: str | None = None
        """The error of the first failed capture. After it, all forward passes run eagerly over the same buffers."""
        self._captured: dict[Hashable, CapturedForward] = {}
        self.latest: tuple[Any, Any] = None, None
        """Key and ``CapturedForward`` of the latest forward pass, whose buffers keep its inputs until the next one."""

    def __len__(self) -> int:
        return sum(not forward.is_dropped for forward in self._captured.values())

    def reset(self) -> None:
        """Drop all captures, because the memory that they refer to is reallocated."""
        graph_memory(self.device).drop(self._captured.values())
        self._captured.clear()

    def run(self, function: Function, key: Hashable, values: Values) -> Outputs:
        """Run a forward pass, preparing it if needed. The outputs are overwritten when another forward pass of the
        device runs (``CapturedForward``).
        """
        forward = self._captured.get(key)
        if forward is None or forward.is_dropped:
            forward = self._captured[key] = self._prepare(function, values)
        fill(forward.inputs, values)
        self.latest = key, forward
        return function(forward.inputs) if self.runs_eagerly else forward()

    @property
    def runs_eagerly(self) -> bool:
        return self.mode == FIXED or self.why_eager is not None

    def _prepare(self, function: Function, values: Values) -> CapturedForward:
        memory = graph_memory(self.device)
        inputs = {name: torch.empty_like(_tensor(value), device=self.device) for name, value in values.items()}
        fill(inputs, values)  # a capture runs the function, so its inputs must be valid
        forward = CapturedForward(inputs)
        if not self.runs_eagerly:
            try:
                forward = CapturedForward(inputs, *memory.capture(functools.partial(function, inputs)))
            except Exception as error:
                lines = str(error).strip().splitlines()
                self.why_eager = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
                warnings.warn(
                    f"{self.description} cannot run in mode {self.mode} ({self.why_eager}); it runs eagerly",
                    EagerNotice,
                    stacklevel=2,
                )
        return memory.keep(forward)


def check_mode(name: str, device: torch.device, num_devices: int = 1, *, has_states: bool = False) -> str:
    """Return the mode if it is available on this device; of ``auto``, ``cuda-graph`` for a model on one CUDA device,
    else ``eager``. Whether captured steps are right there is tested by ``runtime.preparation.decoding_mode``.

    Args:
        num_devices: over which the model is spread.
        has_states: it keeps recurrent or convolution states, which forward passes over static buffers cannot take back.

    Raises:
        UserError: an unknown mode, CUDA graphs without CUDA, or any mode but eager for a model on several devices.
    """
    if name == AUTO:
        return CUDA_GRAPH if device.type == "cuda" and num_devices == 1 and not has_states else EAGER
    if name not in (*MODES, FIXED):
        raise UserError(f"mode must be {' or '.join(MODES)}; got {name!r}; choose one of these")
    if name != EAGER and has_states:
        raise UserError(
            f"mode {name} cannot take back the recurrent or convolution states of a hybrid model; choose eager"
        )
    if name != EAGER and num_devices > 1:
        raise UserError(
            f"mode {name} needs a model on one device; it is spread over {num_devices}; choose eager, or load it on one device"
        )
    if name == CUDA_GRAPH and device.type != "cuda":
        raise UserError(f"mode {name} needs a CUDA device; the model is on {device}; choose eager")
    return name


def fill(inputs: Mapping[str, Tensor], values: Values) -> None:
    """Copy values into buffers. No synchronization is needed: pageable host memory is staged before the call
    returns.
    """
    for name, value in values.items():
        inputs[name].copy_(_tensor(value), non_blocking=True)


def _tensor(value: NDArray[Any] | Tensor) -> Tensor:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
