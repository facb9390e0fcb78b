"""CUDA graphs of one device: their memory, the stream that captures them, and the limits on both.

A capture allocates from a private pool, from which the caching allocator serves nothing else. All captures of a device
share one pool, so that they also share the memory of their intermediate results. Replays follow each other on one
stream, hence they never use it at the same time.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.modeling.step import Layout, PackedStep

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]
Function = Callable[[Tensor], Outputs]
"""Maps the integers on the device to the result and further outputs. It may depend on its key and on the shapes
of the tensors that it reads, on no other value of the host.
"""

WARM_UPS = 2  # runs before a capture, because libraries initialize themselves in the first one
MAX_CAPTURES = 512
"""Captured forward passes that a device keeps, for each of which the driver needs some MiB beside the pool. A search
uses up to about 200. Beyond the limits, the least recently used one is dropped.
"""
MAX_SHARE = 0.1
"""Share of the device's memory that their inputs and outputs may take."""
_clock = itertools.count()


class CapturedForward:
    """A prepared forward pass: it copies its integers to the device, runs a function over them, and copies the result
    to the host. Both copies are part of the graph, and their host memory is pinned and belongs to this object.

    Its outputs are overwritten when it runs again, and when a capture of the same device that is older than it runs:
    memory in which the older one keeps intermediate results may have become outputs of this one. Without a graph it
    only has buffers, and the function runs eagerly between the copies.

    Args:
        layout: sizes of the input.
        reads: memory beside the input that is kept as long as the graph.
    """

    def __init__(self, layout: Layout, device: torch.device, reads: Sequence[Tensor] = ()) -> None:
        self._is_pinned = device.type == "cuda"
        self._input = torch.zeros(sum(layout.sizes), dtype=torch.int64, pin_memory=self._is_pinned)
        self.integers: NDArray[Any] = self._input.numpy()
        self.step = PackedStep.of(self.integers, layout)
        """The input, on the host."""
        self.on_device = torch.zeros(sum(layout.sizes), dtype=torch.int64, device=device)
        self.layout = layout
        self._result: Tensor | None = None
        self._reads = reads
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Outputs = ()
        """Tensors that the function left on the device."""
        self._done = torch.cuda.Event() if self._is_pinned else None
        self.is_dropped = False
        self.last_used = next(_clock)

    def run(self, function: Function) -> Outputs:
        """Copy, run, copy: the work that a graph repeats."""
        self.on_device.copy_(self._input, non_blocking=True)
        result, *outputs = function(self.on_device)
        if self._result is None:
            self._result = torch.empty(result.shape, dtype=result.dtype, pin_memory=self._is_pinned)
            self.result: NDArray[Any] = self._result.numpy()
            """The function's first output, on the host."""
        self._result.copy_(result, non_blocking=True)
        return tuple(outputs)

    def launch(self, function: Function) -> None:
        """Run on what the input holds; ``wait`` for the result."""
        self.last_used = next(_clock)
        if self.graph is None:
            self.outputs = self.run(function)
        else:
            self.graph.replay()
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self.on_device.device))

    def wait(self) -> NDArray[Any]:
        """The result, once it is on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self.result

    def release_input(self) -> None:
        """Wait until the input may be written again, which it may be at once where the last result was read."""
        if self._done is not None and not self._done.query():
            self._done.synchronize()

    @property
    def memory_bytes(self) -> int:
        """Device memory of the input and outputs, which no other capture shares."""
        return sum(tensor.nbytes for tensor in (self.on_device, *self.outputs))

    def drop(self) -> None:
        """Free buffers and graph."""
        self.release_input()
        self.graph, self.outputs, self._reads, self.is_dropped = None, (), (), True
        del self.on_device, self._input


class GraphMemory:
    """The pool, the stream and the limit that all captures of a device share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.limit, self.limit_bytes = MAX_CAPTURES, math.inf
        if device.type == "cuda":
            self.limit_bytes = MAX_SHARE * torch.cuda.get_device_properties(device).total_memory
        self.num_kept = self.num_dropped = 0
        """Forward passes prepared so far, and those of them that were dropped."""
        self._forwards: weakref.WeakSet[CapturedForward] = weakref.WeakSet()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return sum(not forward.is_dropped for forward in self._forwards)

    def keep(self, forward: CapturedForward) -> None:
        """Count a forward pass, and drop the least recently used ones beyond the limits."""
        live = sorted((one for one in self._forwards if not one.is_dropped), key=lambda one: one.last_used)
        num_bytes = sum(one.memory_bytes for one in (*live, forward))
        for number, oldest in enumerate(live):
            if len(live) - number < self.limit and num_bytes <= self.limit_bytes:
                break
            num_bytes -= oldest.memory_bytes
            self.drop([oldest])
        self._forwards.add(forward)
        self.num_kept += 1

    def drop(self, forwards: Iterable[CapturedForward]) -> None:
        """Free forward passes; each is prepared anew when it is needed again."""
        for forward in forwards:
            self.num_dropped += not forward.is_dropped
            forward.drop()

    def drop_all(self) -> None:
        """Free all forward passes of the device."""
        self.drop([forward for forward in self._forwards if not forward.is_dropped])

    def capture(self, function: Run) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """Capture a function; returns its graph and outputs. An error is what the function raised, not what torch makes
        of it at the end. Where the memory does not suffice, all other captures are dropped first.
        """
        try:
            return self._capture(function)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        self.drop_all()  # only here: the error refers to the memory of the failed capture
        torch.cuda.empty_cache()
        return self._capture(function)

    def _capture(self, function: Run) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        graph = torch.cuda.CUDAGraph()
        outputs: Outputs = ()
        cause: Exception | None = None
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream(self.device)
            # One stream for all captures and warm-ups: libraries keep a workspace for each stream that they have seen.
            stream = self._stream = self._stream or torch.cuda.Stream(self.device)
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function()
            caller.wait_stream(stream)
            # Other threads may allocate meanwhile: a capture that a request needs does not wait for them.
            captured = torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local")
            try:
                # The outer context restores the stream where the end of a failed capture raises, which torch.cuda.graph
                # does not.
                with torch.cuda.stream(stream), captured:
                    try:
                        outputs = function()
                    except Exception as error:
                        cause = error
                        raise
            except Exception as error:
                raise (cause or error) from None
            finally:
                cause = None  # else it would keep its own traceback, and so the memory of the failed capture
        self._graphs.add(graph)
        return graph, outputs

    @property
    def _pool(self) -> Any:
        """The pool of the live graphs; None for a new one, because a pool ends with its last graph."""
        return next((graph.pool() for graph in self._graphs), None)

    @property
    def memory_bytes(self) -> int:
        """Memory of the pool and of all input buffers."""
        buffers = sum(forward.on_device.nbytes for forward in self._forwards if not forward.is_dropped)
        if (pool := self._pool) is None:
            return buffers
        return buffers + sum(
            segment["total_size"] for segment in torch.cuda.memory_snapshot(pool, include_traces=False)
        )


@functools.cache
def graph_memory(device: torch.device) -> GraphMemory:
    """The captures of a device, those of all models and decoders of this process."""
    return GraphMemory(device)
