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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]

WARM_UPS = 2  # runs before a capture, because libraries initialize themselves in the first one
MAX_CAPTURES = 512
"""Captured forward passes that a device keeps, for each of which the driver needs some MiB beside the pool. A search
uses up to about 200. Beyond the limits, the least recently used one is dropped.
"""
MAX_SHARE = 0.1
"""Share of the device's memory that their inputs and outputs may take."""
_clock = itertools.count()


class CapturedForward:
    """A prepared forward pass over its own input buffers.

    Its outputs are overwritten when it runs again, and when a capture of the same device that is older than it runs:
    memory in which the older one keeps intermediate results may have become outputs of this one. Without a graph it
    only has buffers.
    """

    def __init__(
        self, inputs: Mapping[str, Tensor], graph: torch.cuda.CUDAGraph | None = None, outputs: Outputs = ()
    ) -> None:
        self.inputs, self._graph, self._outputs = inputs, graph, outputs
        self.is_dropped = False
        self.last_used = next(_clock)

    def __call__(self) -> Outputs:
        """Run on what the buffers hold."""
        assert self._graph is not None, "it was dropped"
        self.last_used = next(_clock)
        self._graph.replay()
        return self._outputs

    @property
    def memory_bytes(self) -> int:
        """Memory of the inputs and outputs, which no other capture shares."""
        return sum(tensor.nbytes for tensor in (*self.inputs.values(), *self._outputs))

    def drop(self) -> None:
        """Free buffers and graph."""
        self.inputs, self._graph, self._outputs, self.is_dropped = {}, None, (), True


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

    def keep(self, forward: CapturedForward) -> CapturedForward:
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
        return forward

    def drop(self, forwards: Iterable[CapturedForward]) -> None:
        """Free forward passes; each is prepared anew when it is needed again."""
        for forward in forwards:
            self.num_dropped += not forward.is_dropped
            forward.drop()

    def capture(self, function: Run) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """Capture a function; returns its graph and outputs. An error is what the function raised, not what torch makes
        of it at the end. Where the memory does not suffice, all other captures are dropped first.
        """
        try:
            return self._capture(function)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        self.drop(list(self._forwards))  # only here: the error refers to the memory of the failed capture
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
        buffers = sum(tensor.nbytes for forward in self._forwards for tensor in forward.inputs.values())
        if (pool := self._pool) is None:
            return buffers
        return buffers + sum(
            segment["total_size"] for segment in torch.cuda.memory_snapshot(pool, include_traces=False)
        )


@functools.cache
def graph_memory(device: torch.device) -> GraphMemory:
    """The captures of a device, those of all models and decoders of this process."""
    return GraphMemory(device)
