"""Stand-ins for the streams and graphs of ``torch.cuda`` on a rehearsed device (``tests/rehearsal.py``).

They hold what the rehearsal has to know of work on a device: which stream is current, which operations a graph repeats
and which memory it reads. Everything they run is run at once, on the CPU.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.imports import ROOT

MEMORY_BYTES = 80 << 30
H100 = "NVIDIA H100 80GB HBM3"
_PACKAGE = str(ROOT / "autotune")
_numbers = itertools.count(1)


class CudaError(RuntimeError):
    """Refused, as by a real device."""


class Allocation:
    """Memory of a device; freed when no tensor uses it any more."""

    def __init__(self, num_bytes: int, device: torch.device, pool: tuple[int, int] | None) -> None:
        self.num_bytes, self.device = num_bytes, device
        self.pool = pool  # of the capture that allocated it


class Call(NamedTuple):
    """An operation of a graph, on the host's memory."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any  # of the captured run
    transfer: str | None = None
    """``to_device`` or ``to_host``: a copy from or to pinned memory."""


class RehearsedCuda:
    """State of the rehearsed devices: current device and streams, memory, waits, the capture, the graphs."""

    def __init__(self, num_devices: int, name: str) -> None:
        self.num_devices, self.index, self.name = num_devices, 0, name
        self.streams = {index: Stream(torch.device("cuda", index)) for index in range(num_devices)}
        self.num_streams = 0  # made by the code under test
        self.underway: CUDAGraph | None = None
        self.capture_index = 0
        self.memory_bytes = MEMORY_BYTES
        self.graphs: weakref.WeakSet[CUDAGraph] = weakref.WeakSet()
        self.num_waits = self.num_replays = self.num_captures = 0
        self.num_transfers = Counter[str]()
        self.in_flight: list[tuple[Tensor, Tensor]] = []
        """Pinned memory that replays have not filled yet, and what will be there once the host has waited."""
        self.launched_on = 0  # the device of the latest replay
        self.being_read: list[tuple[Tensor, Tensor]] = []
        """Pinned memory that replays read until then, and what was there when they were launched."""
        self.live_bytes = 0

    # -------- waits and refusals

    @property
    def capture(self) -> CUDAGraph | None:
        """The capture of this thread."""
        is_here = self.underway is not None and self.underway.thread == threading.get_ident()
        return self.underway if is_here else None

    def wait(self, what: str) -> None:
        """The host waits for the device, which ends a capture of the mode ``global`` in any thread."""
        if self.capture is not None or (self.underway is not None and self.underway.error_mode == "global"):
            self.refuse(f"operation not permitted when stream is capturing ({what})")
        self.num_waits += 1
        for pinned, content in self.being_read:
            if not torch.equal(pinned, content):
                raise CudaError(f"pinned memory was written while a graph read it, before {what} @ {caller()}")
        for pinned, content in self.in_flight:
            pinned.copy_(content)
        self.being_read, self.in_flight = [], []

    def refuse(self, what: str) -> NoReturn:
        if self.underway is not None:
            self.underway.failure = what
        raise CudaError(f"{what} @ {caller()}")

    # -------- memory

    def allocate(self, host: Tensor, device: torch.device) -> Allocation:
        num_bytes = host.untyped_storage().nbytes()
        if self.live_bytes + num_bytes > self.memory_bytes:
            if self.capture is not None:
                self.capture.failure = "out of memory"
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
        allocation = Allocation(num_bytes, device, None if self.capture is None else self.capture.pool())
        self.live_bytes += num_bytes
        weakref.finalize(allocation, self._free, num_bytes)
        if self.capture is not None:
            self.capture.own.append((weakref.ref(allocation), host))
        return allocation

    def _free(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    def memory_snapshot(self, mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        """Live memory of graphs' pools, a segment each, and of the default pool."""
        in_pools = Counter[tuple[int, int]]()
        for captured in self.graphs:
            in_pools[captured.pool()] += sum(found.num_bytes for ref, _ in captured.own if (found := ref()) is not None)
        in_pools[0, 0] = self.live_bytes - in_pools.total()
        return [
            {"device": 0, "segment_pool_id": pool, "total_size": size, "allocated_size": size}
            for pool, size in in_pools.items()
            if mempool_id in (None, pool)
        ]

    # -------- devices and streams

    def index_of(self, device: Any = None) -> int:
        if device is None:
            return self.index
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.index if index is None else int(index)

    def current_stream(self, device: Any = None) -> Stream:
        return self.streams[self.index_of(device)]

    @contextmanager
    def use_device(self, device: Any) -> Iterator[None]:
        before, self.index = self.index, self.index_of(device)
        try:
            yield
        finally:
            self.index = before

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """As ``torch.cuda.stream``: the stream's device is current too."""
        before = self.index, dict(self.streams)
        self.index = int(stream.device.index)
        self.streams[self.index] = stream
        try:
            yield
        finally:
            self.index, self.streams = before

    def new_stream(self, device: Any = None, **options: Any) -> Stream:
        self.num_streams += 1
        return Stream(torch.device("cuda", self.index_of(device)))

    @property
    def namespace(self) -> dict[str, Any]:
        """Stand-ins for functions and classes of ``torch.cuda``."""
        CUDAGraph.current = graph.current = Event.current = self
        properties = SimpleNamespace(
            name=self.name, multi_processor_count=132, total_memory=MEMORY_BYTES, major=9, minor=0
        )
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: self.num_devices,
            "current_device": lambda: self.index,
            "set_device": lambda device: setattr(self, "index", self.index_of(device)),
            "device": self.use_device,
            "synchronize": lambda device=None: self.wait("synchronize"),
            "Stream": self.new_stream,
            "stream": self.use_stream,
            "current_stream": self.current_stream,
            "default_stream": self.current_stream,
            "CUDAGraph": CUDAGraph,
            "graph": graph,
            "Event": Event,
            "is_current_stream_capturing": lambda: self.capture is not None,
            "memory_allocated": lambda device=None: self.live_bytes,
            "memory_snapshot": self.memory_snapshot,
            "mem_get_info": lambda device=None: (self.memory_bytes - self.live_bytes, self.memory_bytes),
            "get_per_process_memory_fraction": lambda device=None: 1.0,
            "empty_cache": lambda: None,
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: properties.name,
            "get_device_capability": lambda device=None: (9, 0),
            "is_bf16_supported": lambda **options: True,
        }


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device, self.number = device, next(_numbers)

    def wait_stream(self, other: Stream) -> None:
        pass


class Event:
    """Everything that was launched before it is done once the host has waited for it."""

    current: RehearsedCuda

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.current.current_stream()
        if self.current.in_flight and stream.device.index != self.current.launched_on:
            raise CudaError(f"an event of {stream.device} does not wait for cuda:{self.current.launched_on}")

    def query(self) -> bool:
        return not self.current.in_flight

    def synchronize(self) -> None:
        self.current.wait("an event")


class CUDAGraph:
    """Repeats captured operations on the same memory, without the host's decisions."""

    current: RehearsedCuda

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[Call] = []
        self.reads: dict[int, tuple[weakref.ref[Allocation], str]] = {}  # memory from outside the capture
        self.own: list[tuple[weakref.ref[Allocation], Tensor]] = []  # memory that the capture allocated
        self.failure: str | None = None
        self.thread, self.error_mode = threading.get_ident(), "global"
        self.order = 0
        self._pool: tuple[int, int] | None = None

    def pool(self) -> tuple[int, int]:
        assert self._pool is not None
        return self._pool

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        device, self.error_mode = self.current, capture_error_mode
        if device.underway is not None:
            raise CudaError("a capture is underway already")
        if pool is not None and not any(graph._pool == pool for graph in device.graphs):
            raise CudaError("the pool of a capture must be that of a live graph, or a new one")
        self._pool = pool or (0, next(_numbers))
        device.underway, device.capture_index = self, device.index
        self._device_index = device.index

    def capture_end(self) -> None:
        device = self.current
        device.underway = None
        if self.failure is not None:
            raise CudaError("operation failed due to a previous error during capture")
        if not self.calls:
            raise CudaError("the graph is empty: nothing ran on the capturing stream")
        self.order = next(_numbers)
        self.own = [(allocation, tensor) for allocation, tensor in self.own if allocation() is not None]
        device.graphs.add(self)
        device.num_captures += 1

    def replay(self) -> None:
        device = self.current
        device.num_replays += 1
        device.launched_on = self._device_index
        for allocation, what in self.reads.values():
            if allocation() is None:
                raise CudaError(f"a replay reads memory that was freed: {what}")
        with _disable_current_modes():  # the rehearsal checked each call at its capture
            self._repeat()

    def _repeat(self) -> None:
        device = self.current
        for call in self.calls:
            device.num_transfers[call.transfer or ""] += 1
            if call.transfer == "to_device":
                device.being_read.append((call.args[1], call.args[1].clone()))
            if call.transfer == "to_host":
                device.in_flight.append((call.args[0], call.args[1].clone()))
                poison(call.args[0])
                continue
            outputs = call.function(*call.args, **call.kwargs)
            if outputs is call.outputs:  # in place
                continue
            for captured, again in zip(tensors_of(call.outputs), tensors_of(outputs), strict=True):
                if captured.data_ptr() != again.data_ptr():  # no view, and not in place
                    captured.copy_(again)
        # A later capture of the pool may have its outputs where this one has intermediate results.
        for other in device.graphs:
            if other._pool == self._pool and other.order > self.order:
                for allocation, tensor in other.own:
                    if allocation() is not None:
                        poison(tensor)

    def reset(self) -> None:
        self.calls.clear()


class graph:
    """``torch.cuda.graph`` as torch 2.13 has it: where the capture's end raises, the stream is not restored."""

    current: RehearsedCuda

    def __init__(self, cuda_graph: CUDAGraph, pool: Any, stream: Stream, capture_error_mode: str = "global") -> None:
        self._graph, self._pool, self._error_mode = cuda_graph, pool, capture_error_mode
        self._context = self.current.use_stream(stream)

    def __enter__(self) -> None:
        self.current.wait("the beginning of a capture")
        self._context.__enter__()
        self._graph.capture_begin(self._pool, self._error_mode)

    def __exit__(self, *error: Any) -> None:
        self._graph.capture_end()
        self._context.__exit__(None, None, None)


def tensors_of(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_of(value)


def poison(host: Tensor) -> None:
    """Fill memory with values that show where they are read."""
    if host.dtype.is_floating_point or host.dtype.is_complex:
        host.fill_(float("nan"))
    else:
        host.fill_(1 if host.dtype in (torch.bool, torch.uint8) else -7777)


def caller() -> str:
    """The innermost lines of the package that lead here."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < 2:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "elsewhere"
