"""The bandwidth that a copy reaches on a device."""

from __future__ import annotations

import numpy as np
import torch

from autotune.machine.device import free_memory
from autotune.modeling.host import now_ms

COPY_BYTES = 1 << 29  # more than the caches of processors hold
MEMORY_SHARE = 1 / 8  # of the free memory that source and destination of the copy may take each
COPIES = 7


def copy_gb_per_second(device: str) -> float:
    """Rate of a copy in a device's memory, median; every byte counts as one read and one written."""
    size = max(1, min(COPY_BYTES, int(free_memory(device) * MEMORY_SHARE)))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    destination = torch.zeros_like(source)  # written, so that its pages exist before the first copy
    times = []
    for _ in range(COPIES):
        started = now_ms(source.device)
        destination.copy_(source)
        times.append(now_ms(source.device) - started)
    return 2 * size / (float(np.median(times)) * 1e6)
