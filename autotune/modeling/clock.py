"""Clocks for work on a device."""

from __future__ import annotations

import time

import torch


def now_ms(device: torch.device) -> float:
    """Wall-clock time after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


def host_ms() -> float:
    """Wall-clock time where the device is known to be idle, as after a transfer to the host: nothing is waited for."""
    return time.perf_counter() * 1e3
