"""What there is of memory, and a refusal with the numbers before something takes more."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import UserError

if TYPE_CHECKING:
    import torch


def gib(number: float) -> str:
    """As people read it."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def free_memory(device: torch.device | str) -> int | None:
    """Bytes that this process can still take; None where the system does not say."""
    if str(device).startswith("cuda"):
        import torch

        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + spare
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def check_room(device: torch.device | str, needs: Mapping[str, int], *, what: str, advice: str, freed: int = 0) -> None:
    """Refuse what does not fit, before it is allocated.

    Args:
        device: where.
        needs: bytes, by part.
        what: that needs them.
        advice: what to do where there are too few.
        freed: bytes in use now that will be given back first.

    Raises:
        UserError: more than is free.
    """
    free, total = free_memory(device), sum(needs.values())
    if free is not None and total > free + freed:
        parts = ", ".join(f"{name} {gib(number)}" for name, number in needs.items())
        raise UserError(
            f"{what} needs {gib(total)} of memory on {device} ({parts}), and {gib(free + freed)} are free; {advice}"
        )
