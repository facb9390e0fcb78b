"""The host beside a device: its clock, the CPU threads of a step, and transfers during a round.

A forward pass of a few tokens ends before a second thread has started, so that threads are limited. A transfer to the
host synchronizes with the device, so there are few, and all of them are made here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def now_ms(device: torch.device) -> float:
    """Wall-clock time after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


def host_ms() -> float:
    """Wall-clock time where the device is known to be idle, as after a transfer to the host: nothing is waited for."""
    return time.perf_counter() * 1e3


@contextmanager
def limited_threads(number: int | None) -> Iterator[None]:
    """Limit torch to ``number`` threads inside the context; None changes nothing."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Copy to the host; synchronizes."""
    return tensor.cpu().numpy()  # type: ignore[no-any-return]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device without synchronization: pageable memory is staged before the call returns."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def rows_to_host(tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Copy integers and float32 numbers of one shape to the host in one transfer."""
    rows = to_host(torch.stack([tokens.int(), logprobs.view(torch.int32)]))
    return rows[0], rows[1].view(np.float32)


def select(states: Tensor, indices: NDArray[np.int64], dim: int) -> Tensor:
    """A few slices of ``states`` along ``dim``, copied. Nothing is sent to a device: there the slices are views by
    number.
    """
    if states.device.type == "cpu":
        return states.index_select(dim, torch.from_numpy(indices))
    return torch.cat([states.narrow(dim, index, 1) for index in indices.tolist()], dim)
