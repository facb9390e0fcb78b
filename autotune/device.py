"""Which device this is, as far as latency is concerned."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import UserError

if TYPE_CHECKING:
    import torch
import platform
import re

from autotune.documents.fingerprint import Fingerprint


def _cpu_model() -> str:
    """The processor as /proc names it, with its feature level: cloud machines often hide the exact model."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = {key: value for key, value in re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", text, re.MULTILINE)}
    numbers = "/".join(found.get(key, "?") for key in ("cpu family", "model", "stepping"))
    return f"{found.get('model name', platform.machine())} ({numbers})"


def fingerprint(device: str = "cpu") -> Fingerprint:
    """The fingerprint of ``cpu`` or ``cuda:N``.

    Raises:
        UserError: no such device on this machine.
    """
    if device == "cpu":
        import torch

        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Fingerprint(
            name="cpu", kind="cpu", model=_cpu_model(), num_cores=torch.get_num_threads(), memory_bytes=memory
        )
    import torch

    index = device.partition(":")[2] or "0"
    if not torch.cuda.is_available() or not index.isdigit() or int(index) >= torch.cuda.device_count():
        raise UserError(
            f"device {device!r} is not on this machine; it has: {', '.join(local_devices())}; choose one of them"
        )
    properties = torch.cuda.get_device_properties(int(index))
    return Fingerprint(
        name=short_name(properties.name),
        kind="cuda",
        model=properties.name,
        num_cores=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        driver=_driver_version(),
    )


def _driver_version() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""
    return version if isinstance(version, str) else str(version.decode())


def short_name(model: str) -> str:
    """``h200`` of ``NVIDIA H200``; ``rtx4090`` of ``NVIDIA GeForce RTX 4090``."""
    words = re.sub(
        r"\b(nvidia|geforce|tesla|graphics|gpu|pcie|sxm\d?|hbm\d?e?|\d+\s*gb)\b", " ", model.lower().replace("-", " ")
    )
    return "".join(words.split()) or "gpu"


def local_gpus() -> list[str]:
    """Short names of this machine's NVIDIA GPUs, as the driver reports them: needs no torch."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        models = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    return [short_name(model if isinstance(model, str) else model.decode()) for model in models]


def local_devices() -> list[str]:
    """Devices of this machine, as ``--device`` takes them."""
    import torch

    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def choose_device(name: str) -> str:
    """``auto`` is the accelerator, or the CPU where there is none; another name is checked.

    Raises:
        UserError: no such device on this machine.
    """
    if name == "auto":
        return local_devices()[-1] if len(local_devices()) == 1 else "cuda:0"
    if name == "cpu" or re.fullmatch(r"cuda(:\d+)?", name):
        fingerprint(name)
        return name
    raise UserError(
        f"unknown device {name!r}; this machine has: {', '.join(local_devices())}; choose one of them, or auto"
    )


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
