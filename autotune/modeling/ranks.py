"""The processes of ``torchrun`` that hold a target together, each a part of its layers (tensor parallelism).

Rank 0 runs the verb. Before each forward pass of the target it broadcasts what to run, and then runs it; the others
follow (``follower.py``). A message is one broadcast of integers on the CPU, over gloo, for which a follower waits
without the GPU: the integers of a packed step (``step.py``), or the size of another operation, which comes next.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from autotune.errors import UserError
from autotune.modeling.step import Layout
from autotune.trees.limits import Ints

RENDEZVOUS = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the environment that torchrun sets beside ``WORLD_SIZE``."""
ARRIVAL = timedelta(seconds=60)
"""Time in which all processes arrive."""
IDLE = timedelta(days=365)
"""Time for which followers wait for rank 0, which may serve nobody for days. They see at once that it has ended."""
_FAILURE = "autotune/failure"
_OPERATION, _STEP = range(2)
_FIRST_BUFFER = 512  # integers of a message: enough for trees of about 60 nodes


class Ranks:
    """The processes of this command.

    Args:
        store: the rendezvous, which outlives the processes.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.num_broadcasts = self.num_bytes = 0
        """Broadcasts of this process so far, and their bytes."""
        self._store = store
        self._buffer = torch.zeros(_FIRST_BUFFER, dtype=torch.int64)

    def send(self, operation: str, *arguments: Any) -> None:
        """Let the followers run an operation; a follower itself sends nothing."""
        if self.rank > 0:
            return
        content = io.BytesIO()
        torch.save((operation, arguments), content)
        payload = torch.from_numpy(np.frombuffer(content.getvalue(), np.uint8).copy())
        self._buffer[:2] = torch.tensor([_OPERATION, len(payload)])
        self._broadcast(self._buffer)
        self._broadcast(payload)

    def send_step(
        self, layout: Layout, integers: Ints, moves: Sequence[int], *, is_captured: bool = False, is_new: bool = False
    ) -> None:
        """Let the followers run a packed step, in one broadcast.

        Args:
            integers: the ``PackedStep``, of which the layout may leave out the end.
            moves: of the cache since the last step (``SlabCache.moves``).
            is_captured: replay a CUDA graph, which is captured first if ``is_new``.
        """
        if self.rank > 0:
            return
        header = [_STEP, is_captured, is_new, *layout, len(moves), *moves]
        size = sum(layout.sizes)
        if len(header) + size > len(self._buffer):
            self._resize(2 * (len(header) + size))
        message = self._buffer.numpy()
        message[: len(header)] = header
        message[len(header) : len(header) + size] = integers[:size]
        self._broadcast(self._buffer)

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """The next operation with its arguments, as rank 0 sent it; tensors are on this rank's device."""
        while True:
            self._broadcast(self._buffer)
            kind, size, *_ = header = self._buffer[:8].tolist()
            if kind == _STEP:
                end = 8 + header[7]
                message = self._buffer.numpy()
                layout = Layout(*header[3:7])
                integers = message[end : end + sum(layout.sizes)]
                return "step", (layout, integers, message[8:end].tolist(), bool(header[1]), bool(header[2]))
            payload = torch.empty(size, dtype=torch.uint8)
            self._broadcast(payload)
            content = io.BytesIO(payload.numpy())
            operation, arguments = torch.load(content, map_location=self.device, weights_only=False)
            if operation != "resize":
                return operation, arguments
            self._buffer = torch.zeros(*arguments, dtype=torch.int64)

    def _resize(self, size: int) -> None:
        self.send("resize", size)
        self._buffer = torch.zeros(size, dtype=torch.int64)

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)
        self.num_broadcasts += 1
        self.num_bytes += tensor.nbytes

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a tensor over all processes, each of which calls this."""
        dist.all_reduce(tensor)
        return tensor / self.size

    def require_same(self, what: dict[str, str]) -> None:
        """Refuse processes that differ in one of the values; each process calls this."""
        others: list[dict[str, str]] = [{} for _ in range(self.size)]
        dist.all_gather_object(others, what)
        for rank, other in enumerate(others):
            if differing := [name for name in what if other[name] != others[0][name]]:
                name = differing[0]
                raise UserError(
                    f"process {rank} has another {name} than process 0 ({other[name]:.60} and {others[0][name]:.60}); give "
                    "every node the same package and files"
                )

    def fail(self, reason: str) -> None:
        """Tell rank 0 why this process ends."""
        self._store.set(_FAILURE, f"process {self.rank}: {reason}")

    def failure(self) -> str | None:
        """What ``fail`` was told in another process."""
        with suppress(dist.DistError):  # torchrun may have ended
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE).decode())
        return None


def is_transport(error: BaseException) -> bool:
    """Whether an error says that another process cannot be reached."""
    is_gloo = isinstance(error, RuntimeError) and ("gloo" in str(error) or "Connection" in str(error))
    return is_gloo or isinstance(error, dist.DistError)


_joined: list[Ranks] = []


def joined() -> Ranks | None:
    """The processes of this command; None if it is the only one."""
    return _joined[0] if _joined else None


def failure(error: BaseException) -> str | None:
    """The line for an error that follows from the end of another process; None for others."""
    if (ranks := joined()) is None:
        return None
    end = "another process of torchrun has ended; run the same command again"
    return ranks.failure() or (end if is_transport(error) else None)


def join() -> Ranks:
    """Wait for the other processes of torchrun. Processes that this one starts do not belong to them.

    Raises:
        UserError: the rendezvous is incomplete, another process does not arrive, or two share a GPU.
    """
    size = int(os.environ.pop("WORLD_SIZE"))
    if missing := [name for name in RENDEZVOUS if not os.environ.get(name)]:
        raise UserError(
            f"WORLD_SIZE is {size}, and {', '.join(missing)} is not set; start the command with torchrun "
            "--nproc-per-node N -m autotune, or unset WORLD_SIZE"
        )
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if local_size > torch.cuda.device_count():
            raise UserError(
                f"each process needs a GPU of its own; got {local_size} processes for {torch.cuda.device_count()} GPUs; "
                "lower --nproc-per-node, or hide the GPUs with CUDA_VISIBLE_DEVICES= to compute on the CPU"
            )
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    store = _rendezvous(rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=IDLE)
    _joined[:] = [Ranks(rank, size, device, store)]
    return _joined[0]


def _rendezvous(rank: int, size: int) -> Any:
    """The store of the rendezvous, at which all processes have arrived."""
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=ARRIVAL))
        store.set(f"autotune/{rank}", "")
        store.wait([f"autotune/{other}" for other in range(size)], ARRIVAL)
    except dist.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"{size} processes did not arrive at {place} within {ARRIVAL.seconds} s; check WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT of each node, or start the command with torchrun"
        ) from error
    return store
