"""Clocks for work on a device."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


def now_ms(device: torch.device) -> float:
    """Wall-clock time after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


def host_ms() -> float:
    """Wall-clock time where the device is known to be idle, as after a transfer to the host: nothing is waited for."""
    return time.perf_counter() * 1e3


class DeviceTimer:
    """Measures the time between marks on the device's own clock, without synchronization."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter() * 1e3)

    @property
    def ms(self) -> list[float]:
        """Time between consecutive marks. The device must have passed the last one."""
        pairs = pairwise(self._marks)
        if self._device.type == "cuda":
            return [before.elapsed_time(after) for before, after in pairs]
        return [after - before for before, after in pairs]
