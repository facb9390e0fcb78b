"""A simulated GPU: the rehearsed device with a clock, so that a small model takes the time of a large one.

Two times advance: the host's, which launches, copies and waits, and the device's, which runs kernels one after the
other. A kernel takes the largest of a least time, its weights' bytes over the bandwidth, and its operations over the
arithmetic rate; the sizes are those of the simulated model. ``time.monotonic`` and ``time.perf_counter`` give the
host's time. Python code takes no time of its own, because the simulation is slower than what it simulates, except
functions that are charged (``charged``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from autotune.cost.roofline import find_limits
from tests.rehearsal import DeviceTensor, Rehearsal, is_view
from tests.rehearsed_cuda import CUDAGraph, tensors_of

HOST_CORES = 2  # over which the CPU time of charged functions is spread
BANDWIDTH_SHARE, ARITHMETIC_SHARE = 0.9, 0.6  # of the datasheet's rates that kernels reach
KERNEL_S = 1.7e-6  # the least time of a kernel
ATTENTION_S = 20e-9  # of an attention kernel with a mask, for each token of the padded KV length
LAUNCH_S = 18e-6  # of the host, with the Python code of an eager kernel
REPLAY_S = 25e-6
READ_S = 2e-6
TRANSFER_S = 40e-6  # of the host, with the Python code around it
NOISE = 0.01  # standard deviation of the logarithm of the time between two waits


@dataclass(frozen=True)
class SimulatedSize:
    """Sizes of a simulated model."""

    num_layers: int
    layer_bytes: float
    """Weights of all layers."""
    head_bytes: float
    """Weights outside the layers that a step reads."""


@dataclass
class _Weights:
    num_bytes: float  # simulated, of a whole tensor
    num_elements: int


class SimulatedDevice(Rehearsal):
    """One simulated GPU, named as a datasheet in ``profiles/devices``."""

    def __init__(self, name: str, *, seed: int = 0) -> None:
        limits = find_limits(name)
        super().__init__(num_devices=1, name=limits.model)
        self.byte_s = 1 / (BANDWIDTH_SHARE * limits.memory_gb_per_second * 1e9)
        self.operation_s = 1 / (ARITHMETIC_SHARE * limits.bfloat16_tflops * 1e12)
        self.host_s = self.device_s = 0.0
        self.busy_s = 0.0
        """Time in which the device has run kernels."""
        self.kernels_per_kernel = 1.0
        """Kernels of the simulated model for one of the model that runs."""
        self._random = np.random.default_rng(seed)
        self._weights: dict[int, _Weights] = {}
        wait = self.cuda.wait

        def timed_wait(what: str) -> None:
            wait(what)
            self.host_s = max(self.host_s, self.device_s) + TRANSFER_S

        self.cuda.wait = timed_wait  # type: ignore[method-assign]

    # -------- clock

    def now_s(self) -> float:
        """The host's time. Reading it takes time, so that no code takes none."""
        self.host_s += READ_S
        return self.host_s

    def charged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose CPU time advances the host's time, as replay and tree search do."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            result = function(*args, **kwargs)
            self.host_s += (time.process_time() - started) / HOST_CORES
            return result

        return timed

    def __enter__(self) -> SimulatedDevice:
        super().__enter__()
        for name in ("monotonic", "perf_counter"):
            for function in _functions_with_default(getattr(time, name)):
                defaults = {
                    k: self.now_s if v is getattr(time, name) else v for k, v in function.__kwdefaults__.items()
                }
                self._replace(function, "__kwdefaults__", defaults)
            self._replace(time, name, self.now_s)
        self._replace(CUDAGraph, "replay", self._replay)
        return self

    @property
    def _replay(self) -> Callable[[CUDAGraph], None]:
        """Repeats a graph and advances the clock. It checks nothing: the rehearsal's own replay does."""

        def replay(graph: CUDAGraph) -> None:
            self.cuda.num_replays += 1
            with _disable_current_modes():
                for function, args, kwargs, outputs, _ in graph.calls:
                    again = function(*args, **kwargs)
                    if isinstance(outputs, Tensor):
                        if again is not outputs and again.data_ptr() != outputs.data_ptr():
                            outputs.copy_(again)
                    else:
                        for captured, one in zip(tensors_of(outputs), tensors_of(again), strict=True):
                            if captured.data_ptr() != one.data_ptr():
                                captured.copy_(one)
            self.host_s += REPLAY_S
            self._run_kernels(graph.seconds)  # type: ignore[attr-defined]

        return replay

    def _run_kernels(self, seconds: float) -> None:
        seconds *= float(np.exp(NOISE * self._random.standard_normal()))
        self.device_s = max(self.device_s, self.host_s) + seconds
        self.busy_s += seconds

    # -------- models

    def simulate(self, size: SimulatedSize, layers: Iterable[nn.Module], model: nn.Module) -> None:
        """Give a loaded model, with its ``layers``, the sizes of another."""
        layers = list(layers)
        within = {id(parameter) for layer in layers for parameter in layer.parameters()}
        everything = {id(parameter): parameter for parameter in model.parameters()}
        outside = [p for key, p in everything.items() if key not in within and p.dim() > 1]
        for parameters, num_bytes in (
            ([everything[key] for key in within], size.layer_bytes),
            (outside, size.head_bytes),
        ):
            total = sum(parameter.numel() for parameter in parameters)
            for parameter in parameters:
                share = num_bytes * parameter.numel() / total
                self._weights[id(_allocation(parameter))] = _Weights(share, parameter.numel())
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self._enter_layers(size.num_layers / len(layers)))
            layer.register_forward_hook(lambda *_: self._enter_layers(1.0))

    def _enter_layers(self, kernels_per_kernel: float) -> None:
        self.kernels_per_kernel = kernels_per_kernel

    # -------- kernels

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = super().run(func, args, kwargs)
        inputs = [tensor for tensor in tensors_of([*_flat(args), *kwargs.values()]) if isinstance(tensor, DeviceTensor)]
        found = [tensor for tensor in tensors_of(_flat(outputs)) if isinstance(tensor, DeviceTensor)]
        if (inputs or found) and not is_view(func, inputs, found):
            seconds = self._kernel_s(func.overloadpacket.__name__, inputs, found)
            if (capture := self.cuda.capture) is not None:
                capture.seconds = getattr(capture, "seconds", 0.0) + seconds  # type: ignore[attr-defined]
                self.host_s += LAUNCH_S * self.kernels_per_kernel
            else:
                self.host_s += LAUNCH_S * self.kernels_per_kernel
                self._run_kernels(seconds)
        return outputs

    def _kernel_s(self, name: str, inputs: list[DeviceTensor], outputs: list[DeviceTensor]) -> float:
        """Time of an operation's kernels in the simulated model."""
        bytes_read = operations = 0.0
        if name != "embedding":
            for tensor in inputs:
                weights = self._weights.get(id(tensor.allocation))
                if weights is not None and tensor.dim() > 1:
                    rows = max(1, outputs[0].numel() // max(1, outputs[0].shape[-1]))
                    bytes_read += weights.num_bytes * tensor.numel() / weights.num_elements
                    operations += (
                        rows * weights.num_bytes * tensor.numel() / weights.num_elements
                    )  # two a weight of two bytes
        seconds = max(bytes_read * self.byte_s, operations * self.operation_s) / self.kernels_per_kernel
        if "scaled_dot_product" in name:
            num_tokens, kv_length = inputs[0].shape[-2], inputs[1].shape[-2]
            seconds = ATTENTION_S * kv_length * max(1.0, num_tokens / 128)
        return max(KERNEL_S, seconds) * self.kernels_per_kernel


def _functions_with_default(value: object) -> Iterator[Any]:
    """The package's functions and methods with a keyword argument of this default."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "autotune"]
    classes = [found for module in modules for found in vars(module).values() if isinstance(found, type)]
    for owner in (*modules, *classes):
        for function in vars(owner).values():
            if isinstance(function, FunctionType) and value in (function.__kwdefaults__ or {}).values():
                yield function


def _flat(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _allocation(parameter: Tensor) -> Any:
    tensor = parameter.data if not isinstance(parameter, DeviceTensor) else parameter
    assert isinstance(tensor, DeviceTensor), "load the model onto the simulated device first"
    return tensor.allocation
