"""CUDA graphs of one device: their memory, the stream that captures them, and the limit on their number.

A capture allocates from a private pool, from which the caching allocator serves nothing else. All captures of a device share
one pool, so that they also share the memory of their intermediate results. Replays follow each other on one stream, hence
they never use it at the same time.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]

WARM_UPS = 2  # runs before a capture, because libraries initialize themselves in the first one
MAX_CAPTURES = 256
"""Captured forward passes that a device keeps; beyond, the least recently used one is dropped. A decoder of six operating
points with contexts of 8,192 tokens needs about 200.
"""
_clock = itertools.count()


class CapturedForward:
    """A prepared forward pass over its own input buffers.

    Its outputs are overwritten when it runs again, and when a capture of the same device that is older than it runs: memory
    in which the older one keeps intermediate results may have become outputs of this one. ``run`` replays it.
    """

    def __init__(self, run: Run, inputs: Mapping[str, Tensor]) -> None:
        self.inputs = inputs
        self._run: Run | None = run
        self.last_used = next(_clock)

    def __call__(self) -> Outputs:
        """Run on what the buffers hold."""
        assert self._run is not None, "it was dropped"
        self.last_used = next(_clock)
        return self._run()

    @property
    def is_dropped(self) -> bool:
        return self._run is None

    @property
    def memory_bytes(self) -> int:
        """Memory of the input buffers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.inputs.values())

    def drop(self) -> None:
        """Free buffers and graph."""
        self._run, self.inputs = None, {}


class GraphMemory:
    """The pool, the stream and the limit that all captures of a device share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.limit = MAX_CAPTURES
        self.num_kept = 0
        """Forward passes prepared so far, dropped ones included."""
        self._forwards: weakref.WeakSet[CapturedForward] = weakref.WeakSet()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return sum(not forward.is_dropped for forward in self._forwards)

    def keep(self, forward: CapturedForward) -> CapturedForward:
        """Count a forward pass, and drop the least recently used ones beyond the limit."""
        live = sorted((one for one in self._forwards if not one.is_dropped), key=lambda one: one.last_used)
        for oldest in live[: max(0, len(live) + 1 - self.limit)]:
            oldest.drop()
        self._forwards.add(forward)
        self.num_kept += 1
        return forward

    def capture(self, function: Run) -> Run:
        """Capture a function; returns its replay. An error is what the function raised, not what torch makes of it at the end."""
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream(self.device)
            # One stream for all captures and warm-ups: libraries keep a workspace for each stream that they have seen.
            stream = self._stream = self._stream or torch.cuda.Stream(self.device)
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function()
            caller.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            outputs = self._captured(graph, stream, function)
        self._graphs.add(graph)

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def _captured(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, function: Run) -> Outputs:
        cause: Exception | None = None
        outputs: Outputs = ()
        try:
            # The outer context restores the stream where the end of a failed capture raises, which torch.cuda.graph does not.
            with torch.cuda.stream(stream), torch.cuda.graph(graph, self._pool, stream):
                try:
                    outputs = function()
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            raise (cause or error) from None
        return outputs

    @property
    def _pool(self) -> Any:
        """The pool of the live graphs; None for a new one, because a pool ends with its last graph."""
        return next((graph.pool() for graph in self._graphs), None)

    @property
    def memory_bytes(self) -> int:
        """Memory of the pool and of all input buffers."""
        buffers = sum(forward.memory_bytes for forward in self._forwards)
        if (pool := self._pool) is None:
            return buffers
        return buffers + sum(
            segment["total_size"] for segment in torch.cuda.memory_snapshot(pool, include_traces=False)
        )


@functools.cache
def graph_memory(device: torch.device) -> GraphMemory:
    """The captures of a device, those of all models and decoders of this process."""
    return GraphMemory(device)
