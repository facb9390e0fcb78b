"""What crosses between the host and the device during a round. A transfer to the host waits for all that the device has
been told to do, so there are few, and all of them are made here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Waits for the device."""
    return tensor.cpu().numpy()  # type: ignore[no-any-return]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Waits for nothing: pageable memory is staged before the call returns."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def rows_to_host(tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Integers, and float32 numbers of the same shape bit for bit, in one transfer."""
    found = to_host(torch.stack([tokens.int(), logprobs.view(torch.int32)]))
    return found[0], found[1].view(np.float32)
