"""The processes of ``torchrun`` that hold models together, each a part of their layers (tensor parallelism).

Rank 0 runs the verb. Before each forward pass of such a model it broadcasts what to run, and then runs it; the others
follow (``sharded.py``). A message is one broadcast of integers on the CPU, over gloo, for which a follower waits
without the GPU: the integers of a packed step (``step.py``), or the size of another operation, which comes next.
"""

from __future__ import annotations

import copy
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
from torch.distributed.rendezvous import rendezvous

from autotune.errors import UserError
from autotune.modeling.step import Layout
from autotune.trees.limits import Ints

RENDEZVOUS = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the environment that torchrun sets beside ``WORLD_SIZE``."""
ARRIVAL = timedelta(seconds=60)
"""Time in which all processes arrive."""
IDLE = timedelta(days=365)
"""Time for which followers wait for rank 0, which may serve nobody for days. They see at once that it has ended."""
FAILURE = "autotune/failure"
"""Key of the store under which a process says why it ends."""
_OPERATION, _STEP = range(2)
MESSAGE = 4096
"""Integers of a message, which the largest step of a target with two kinds of masks fits into. A larger step of a draft
is sent as another operation, in two broadcasts.
"""
_HEADER = 9  # integers before the moves of a step


class Ranks:
    """The processes of this command.

    Args:
        store: the rendezvous, which outlives the processes.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.store = store
        self.model = 0  # the number of the model that is sent for: the target, then drafts in the order of loading
        self.num_drafts = 0
        self._message = torch.zeros(MESSAGE, dtype=torch.int64)

    def of_next_draft(self) -> Ranks:
        """The same processes, as those that hold another draft."""
        self.num_drafts += 1
        ranks = copy.copy(self)
        ranks.model = self.num_drafts
        return ranks

    def send(self, operation: str, *arguments: Any) -> None:
        """Let the followers run an operation; a follower itself sends nothing."""
        if self.rank > 0:
            return
        content = io.BytesIO()
        torch.save((operation, self.model, arguments), content)
        payload = torch.from_numpy(np.frombuffer(content.getvalue(), np.uint8).copy())
        self._message[:2] = torch.tensor([_OPERATION, len(payload)])
        dist.broadcast(self._message, 0)
        dist.broadcast(payload, 0)

    def send_step(
        self, layout: Layout, integers: Ints, moves: Sequence[int], *, is_captured: bool = False, is_new: bool = False
    ) -> None:
        """Let the followers run a packed step, in one broadcast if it fits a message.

        Args:
            integers: the ``PackedStep``, of which the layout may leave out the end.
            moves: of the cache since the last step (``SlabCache.moves``).
            is_captured: replay a CUDA graph, which is captured first if ``is_new``.
        """
        if self.rank > 0:
            return
        header = [_STEP, self.model, is_captured, is_new, *layout, len(moves), *moves]
        content = np.concatenate([header, integers[: sum(layout.sizes)]])
        if len(content) > MESSAGE:
            self.send("step", layout, content[len(header) :], [*moves], is_captured, is_new)
            return
        self._message[: len(content)] = torch.from_numpy(content)
        dist.broadcast(self._message, 0)

    def receive(self) -> tuple[str, int, tuple[Any, ...]]:
        """The next operation with the number of its model and its arguments, as rank 0 sent it; tensors are on this
        rank's device.
        """
        dist.broadcast(self._message, 0)
        kind, size, *_ = header = self._message[:_HEADER].tolist()
        if kind == _STEP:
            end, layout = _HEADER + header[-1], Layout(*header[4:8])
            integers = self._message.numpy()[end : end + sum(layout.sizes)]
            moves = self._message[_HEADER:end].tolist()
            return "step", header[1], (layout, integers, moves, bool(header[2]), bool(header[3]))
        payload = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(payload, 0)
        content = io.BytesIO(payload.numpy().tobytes())
        return torch.load(content, map_location=self.device, weights_only=False)  # type: ignore[no-any-return]

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a tensor over all processes, each of which calls this."""
        dist.all_reduce(tensor)
        return tensor / self.size

    def require_same(self, values: dict[str, str]) -> None:
        """Refuse processes that differ in one of the values, by name; each process calls this."""
        everywhere: list[Any] = [None] * self.size
        dist.all_gather_object(everywhere, values)
        for name in values:
            if len({values[name] for values in everywhere}) > 1:
                all_values = ", ".join(f"{values[name]:.16}" for values in everywhere)
                raise UserError(
                    f"the processes of torchrun have different {name} ({all_values}); give every node the same package and files"
                )


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
    with suppress(dist.DistError):  # the store ends with torchrun
        if ranks.store.check([FAILURE]):
            return str(ranks.store.get(FAILURE).decode())
    return "another process of torchrun has ended; run the same command again" if is_transport(error) else None


def join_ranks() -> Ranks:
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
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=ARRIVAL))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=IDLE)
    except dist.DistError as error:
        raise UserError(
            f"{size} processes did not meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
            f"{ARRIVAL.seconds} s; check WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start the command with torchrun"
        ) from error
    _joined[:] = [Ranks(rank, size, device, store)]
    return _joined[0]
