"""A CUDA rehearsal: tensors that say they are on ``cuda:N`` and compute on the CPU, and a ``torch.cuda`` next to them
with streams, capture and replay. The code under test runs unchanged.

It refuses what a device refuses: tensors of two devices in one operation, host reads and host copies during a capture,
replays that read freed memory. It counts transfers, waits of the host and live bytes. Where CUDA leaves contents open,
it chooses the worst: fresh memory holds NaN or senseless integers, and so do the outputs of a graph once an older graph
of its pool is replayed.

It knows nothing of the numerics of CUDA kernels, of concurrency or of fragmentation.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.modeling.graph_memory import graph_memory
from tests.rehearsed_cuda import H100, Allocation, Call, CudaError, RehearsedCuda, caller, poison, tensors_of

WAITS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount", "_linalg_check_errors"),
}
READS = {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"}  # their results are the host's
MOVES = {"to", "_to_copy"}
COPIES = {"copy_", "copy"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
CPU = torch.device("cpu")


@dataclass
class Counts:
    """Events on the devices."""

    replays: int = 0
    captures: int = 0
    operations: int = 0
    """Operations that the host dispatched one by one, views not counted."""
    to_device: int = 0
    to_host: int = 0
    waits: int = 0
    """How often the host waited for the device, transfers to the host included."""

    def __sub__(self, other: Counts) -> Counts:
        return Counts(**{name: value - getattr(other, name) for name, value in vars(self).items()})


class DeviceTensor(Tensor):
    """A tensor of a rehearsed device. torch's C++ takes it for one of the CPU, because a torch without CUDA has no
    guard for other devices; Python code sees its ``device``.
    """

    host: Tensor
    allocation: Allocation
    _device: torch.device

    @staticmethod
    def __new__(cls, host: Tensor, allocation: Allocation, device: torch.device) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=CPU,
            requires_grad=False,
        )
        tensor.host, tensor.allocation, tensor._device = host, allocation, device
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return int(self._device.index)

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def numpy(self, **options: Any) -> Any:
        raise CudaError("can't convert a cuda tensor to numpy; copy it to the host first")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def is_contiguous(self, *args: Any, **options: Any) -> bool:
        return self.host.is_contiguous(*args, **options)

    def __repr__(self, **options: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self._device})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert Rehearsal.current is not None, f"{func} on a rehearsed device after the rehearsal"
        return Rehearsal.current.run(func, args, kwargs or {})


class Rehearsal(TorchDispatchMode):
    """Rehearsed devices, from ``__enter__`` to ``__exit__``. All tensors are inference tensors."""

    current: ClassVar[Rehearsal | None] = None

    def __init__(self, num_devices: int = 2, name: str = H100) -> None:
        super().__init__()
        self.cuda = RehearsedCuda(num_devices, name)
        self._num_operations = 0
        self._pinned_addresses: set[int] = set()
        self._replaced: list[tuple[Any, str, Any]] = []
        self._inference = torch.inference_mode()

    @property
    def live_bytes(self) -> int:
        return self.cuda.live_bytes

    @property
    def counts(self) -> Counts:
        cuda = self.cuda
        return Counts(
            replays=cuda.num_replays,
            captures=cuda.num_captures,
            operations=self._num_operations,
            to_device=cuda.num_transfers["to_device"],
            to_host=cuda.num_transfers["to_host"],
            waits=cuda.num_waits,
        )

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Counts of what happens inside the context, complete at its end."""
        before, found = self.counts, Counts()
        yield found
        vars(found).update(vars(self.counts - before))

    def __enter__(self) -> Rehearsal:
        assert Rehearsal.current is None, "one rehearsal at a time"
        Rehearsal.current = self
        graph_memory.cache_clear()  # captures of an earlier rehearsal
        for name, function in self.cuda.namespace.items():
            self._replace(torch.cuda, name, function)
        # Its threads would run outside of this dispatch mode, which belongs to one thread.
        self._threads = mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"})
        self._threads.start()
        new_generator = torch.Generator
        self._replace(torch, "Generator", lambda device="cpu": new_generator("cpu"))
        for name in ("tensor", "as_tensor"):  # they copy to a device behind every dispatch mode's back
            self._replace(torch, name, self._copying(getattr(torch, name)))
        self._inference.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inference.__exit__(None, None, None)
        for owner, name, value in reversed(self._replaced):
            setattr(owner, name, value)
        self._replaced.clear()
        self._threads.stop()
        Rehearsal.current = None

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name, None)))
        setattr(owner, name, value)

    def _copying(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
            if isinstance(data, DeviceTensor):
                return data if device is None else data.to(device)
            data = _mapped(lambda value: value.item() if isinstance(value, DeviceTensor) else value, data)
            found = make(data, *args, **options)
            return found if device is None else found.to(device)

        return made

    # -------- dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing traces through it; torch would leave dynamo for every operation, which takes longer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the host's memory, and check and count what it does on a device."""
        name = func.overloadpacket.__name__
        if name == "_has_compatible_shallow_copy_type":
            return False
        flat = _leaves((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        asked = self._asked_device(kwargs, flat)
        if name in MOVES:
            return self._move(func, args, kwargs, asked, tensors)
        if kwargs.get("pin_memory"):
            pinned = func(*args, **kwargs | {"pin_memory": False})
            self._pinned_addresses.add(pinned.data_ptr())
            return pinned
        if not ours and (asked is None or asked.type != "cuda"):
            return func(*args, **kwargs)
        if name in COPIES and (transfer := self._pinned_transfer(args)) is not None:
            return self._transfer(func, args, kwargs, transfer, ours)
        device = self._check(name, args, kwargs, ours, [t for t in tensors if not isinstance(t, DeviceTensor)], asked)
        host_args, host_kwargs = _on_host(args, kwargs)
        outputs = func(*host_args, **host_kwargs)
        if name in EMPTY:
            poison(outputs)
        if name in READS:
            return outputs
        wrapped = self._wrapped(func, host_args, host_kwargs, outputs, ours, device)
        if self.cuda.capture is None:
            self._num_operations += not is_view(func, ours, _device_tensors(wrapped))
        return wrapped

    def _asked_device(self, kwargs: dict[str, Any], flat: list[Any]) -> torch.device | None:
        asked = kwargs.get("device")
        if asked is None:
            asked = next((value for value in flat if isinstance(value, torch.device)), None)
        return None if asked is None else self._with_index(torch.device(asked))

    def _with_index(self, device: torch.device) -> torch.device:
        return torch.device("cuda", self.cuda.index) if device.type == "cuda" and device.index is None else device

    def _check(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ours: list[DeviceTensor],
        others: list[Tensor],
        asked: torch.device | None,
    ) -> torch.device:
        """Refuse or count what the operation needs; returns the device that runs it."""
        devices = {tensor.device for tensor in ours}
        if name in COPIES:
            self._copy(args, kwargs)
            return ours[0].device
        if len(devices) > 1:
            self.cuda.refuse(
                f"expected all tensors to be on the same device, found {sorted(map(str, devices))} in {name}"
            )
        if ours and any(tensor.dim() > 0 for tensor in others):
            if name not in INDEXING:
                self.cuda.refuse(f"expected all tensors to be on the same device, found {devices} and cpu in {name}")
            self.cuda.wait(f"{name} by an index of the host")
        if name in WAITS:
            self.cuda.wait(name)
        if name in INDEXING and any(index.dtype in (torch.bool, torch.uint8) for index in tensors_of(list(args[1]))):
            self.cuda.wait(f"{name} by a mask")
        if name == "repeat_interleave" and len(ours) > 1 and kwargs.get("output_size") is None:
            self.cuda.wait(name)
        device = next(iter(devices)) if ours else asked
        assert device is not None
        return device

    def _wrapped(
        self, function: Any, args: Any, kwargs: Any, outputs: Any, ours: list[DeviceTensor], device: torch.device
    ) -> Any:
        """Outputs as tensors of the device."""
        allocations = {tensor.host.untyped_storage().data_ptr(): tensor.allocation for tensor in ours}
        inputs = {id(tensor.host): tensor for tensor in ours}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in inputs:  # in place
                return inputs[id(value)]
            storage = value.untyped_storage()
            allocation = allocations.get(storage.data_ptr()) if storage.nbytes() else None
            return DeviceTensor(value, allocation or self.cuda.allocate(value, device), device)

        wrapped = wrap(outputs) if isinstance(outputs, Tensor) else _mapped(wrap, outputs)
        if self.cuda.capture is not None and device.index != self.cuda.capture_index:
            self.cuda.refuse(f"work on {device} is not captured on cuda:{self.cuda.capture_index}")
        if self.cuda.capture is not None:
            repeats = function._schema.is_mutable or not is_view(function, ours, _device_tensors(wrapped))
            self._record(Call(function, args, kwargs, outputs), ours, repeats=repeats)
        return wrapped

    def _record(self, call: Call, ours: list[DeviceTensor], *, repeats: bool = True) -> None:
        """Make a call part of the capture, if there is one. Views stay views: no replay ``repeats`` them."""
        if (capture := self.cuda.capture) is None:
            return
        for tensor in ours:
            if tensor.allocation.pool is None and id(tensor.allocation) not in capture.reads:
                what = f"{tuple(tensor.shape)} read @ {caller()}"
                capture.reads[id(tensor.allocation)] = weakref.ref(tensor.allocation), what
        if repeats:
            capture.calls.append(call)

    # -------- transfers

    def _move(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        asked: torch.device | None,
        tensors: list[Tensor],
    ) -> Tensor:
        source = tensors[0]
        target = asked or (tensors[1].device if len(tensors) > 1 else source.device)
        host_args, host_kwargs = _on_host(args, kwargs)
        out: Tensor = func(*host_args, **host_kwargs)
        if target == source.device:
            if not isinstance(source, DeviceTensor):
                return out
            return self._wrapped(func, host_args, host_kwargs, out, [source], target)  # type: ignore[no-any-return]
        if out.untyped_storage().data_ptr() == host_args[0].untyped_storage().data_ptr():
            out = out.clone()
        if target.type == "cpu":
            self.cuda.num_transfers["to_host"] += 1
            self.cuda.wait("a copy to the host")
            return out
        if source.device.type == "cpu":
            self._from_host(bool(kwargs.get("non_blocking")) or any(value is True for value in args[1:]))
        elif self.cuda.capture is not None:
            self.cuda.refuse("operation not permitted when stream is capturing (a copy between devices)")
        return DeviceTensor(out, self.cuda.allocate(out, target), target)

    def _copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        destination, source = args[:2]
        if not isinstance(source, DeviceTensor):
            if not (self.cuda.capture is not None and source.dim() == 0):
                self._from_host(bool(kwargs.get("non_blocking")) or bool((*args, False)[2]))
        elif not isinstance(destination, DeviceTensor):
            self.cuda.num_transfers["to_host"] += 1
            self.cuda.wait("a copy to the host")

    def _transfer(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], transfer: str, ours: list[DeviceTensor]
    ) -> Tensor:
        """A copy from or to pinned memory. A device makes it later; the host of a rehearsal waits for nothing."""
        host_args, host_kwargs = _on_host(args, kwargs)
        call = Call(func, host_args, host_kwargs, func(*host_args, **host_kwargs), transfer)
        self.cuda.num_transfers[transfer] += self.cuda.capture is None
        self._record(call, ours)
        return args[0]  # type: ignore[no-any-return]

    def _pinned_transfer(self, args: tuple[Any, ...]) -> str | None:
        """The direction of a copy from or to pinned memory, which may be captured and does not wait."""
        destination, source = args[:2]
        if isinstance(destination, DeviceTensor) == isinstance(source, DeviceTensor):
            return None
        host = source if isinstance(destination, DeviceTensor) else destination
        if host.data_ptr() not in self._pinned_addresses:
            return None
        return "to_device" if host is source else "to_host"

    def _from_host(self, non_blocking: bool) -> None:
        if self.cuda.capture is not None:
            self.cuda.refuse("operation not permitted when stream is capturing (a copy from pageable host memory)")
        self.cuda.num_transfers["to_device"] += 1
        if not non_blocking:
            self.cuda.wait("a blocking copy from the host")


def is_view(func: Any, inputs: list[DeviceTensor], outputs: list[DeviceTensor]) -> bool:
    """Whether an operation runs no kernel."""
    name = func.overloadpacket.__name__
    own = {id(tensor.allocation) for tensor in inputs}
    is_in_place = name.endswith("_") or name.startswith("index_put")
    return not outputs or (not is_in_place and all(id(tensor.allocation) in own for tensor in outputs))


def _leaves(values: Any) -> list[Any]:
    """All values in nested lists, tuples and dictionaries."""
    found: list[Any] = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, list | tuple | dict):
            if value:
                found.extend(_leaves(value))
        else:
            found.append(value)
    return found


def _device_tensors(values: Any) -> list[DeviceTensor]:
    if isinstance(values, DeviceTensor):
        return [values]
    return [value for value in _leaves([values]) if isinstance(value, DeviceTensor)]


def _mapped(convert: Callable[[Any], Any], values: Any) -> Any:
    """Nested lists, tuples and dictionaries with converted values; torch's pytree does the same, ten times slower."""
    if isinstance(values, list | tuple):
        return type(values)([_mapped(convert, value) for value in values])
    if isinstance(values, dict):
        return {key: _mapped(convert, value) for key, value in values.items()}
    return convert(values)


def _host(value: Any) -> Any:
    """A value of an operation, or a list or tuple of them, as the host's memory."""
    if isinstance(value, DeviceTensor):
        return value.host
    if isinstance(value, list | tuple):
        return type(value)([_host(one) for one in value])
    return CPU if isinstance(value, torch.device) else value


def _on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    host_kwargs = {name: _host(value) for name, value in kwargs.items()}
    if kwargs.get("device") is not None:
        host_kwargs["device"] = CPU
    return tuple([_host(value) for value in args]), host_kwargs
