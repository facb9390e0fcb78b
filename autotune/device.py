"""The devices of this machine: their fingerprints and their memory."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from autotune.documents.fingerprint import Fingerprint
from autotune.errors import UserError

if TYPE_CHECKING:
    import torch


def fingerprint(device: str = "cpu") -> Fingerprint:
    """The fingerprint of ``cpu`` or ``cuda:N``.

    Raises:
        UserError: this machine has no such device.
    """
    import torch

    if device == "cpu":
        return Fingerprint(
            name="cpu",
            kind="cpu",
            model=_cpu_model(),
            num_cores=torch.get_num_threads(),
            memory_bytes=psutil.virtual_memory().total,
        )
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
        driver=_query_nvml()[0],
    )


def _cpu_model() -> str:
    """The processor as /proc names it, with family, model and stepping, because cloud machines often hide the exact name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    numbers = "/".join(fields.get(key, "?") for key in ("cpu family", "model", "stepping"))
    return f"{fields.get('model name', platform.machine())} ({numbers})"


def _query_nvml() -> tuple[str, list[str]]:
    """Version of the NVIDIA driver and names of the GPUs; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        models = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return "", []
    return version, models


def short_name(model: str) -> str:
    """The name of a GPU in commands and files: ``h200`` for ``NVIDIA H200``, ``rtx4090`` for ``NVIDIA GeForce RTX 4090``."""
    words = re.sub(
        r"\b(nvidia|geforce|tesla|graphics|gpu|pcie|sxm\d?|hbm\d?e?|\d+\s*gb)\b", " ", model.lower().replace("-", " ")
    )
    return "".join(words.split()) or "gpu"


def local_gpus() -> list[str]:
    """Short names of this machine's NVIDIA GPUs, as the driver reports them. Needs no torch."""
    return [short_name(model) for model in _query_nvml()[1]]


def local_devices() -> list[str]:
    """Devices of this machine, as ``--device`` takes them."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def choose_device(name: str) -> str:
    """Resolve ``auto`` to the first GPU, or to the CPU if there is none; check any other name.

    Raises:
        UserError: this machine has no such device.
    """
    if name == "auto":
        return "cpu" if len(local_devices()) == 1 else "cuda:0"
    if name == "cpu" or re.fullmatch(r"cuda(:\d+)?", name):
        fingerprint(name)
        return name
    raise UserError(
        f"unknown device {name!r}; this machine has: {', '.join(local_devices())}; choose one of them, or auto"
    )


def gib(num_bytes: float) -> str:
    """Format a size: ``1.5 GiB``, or ``3 MiB`` below one GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def free_memory(device: torch.device | str) -> int:
    """Bytes that this process can still allocate."""
    if not str(device).startswith("cuda"):
        return int(psutil.virtual_memory().available)
    import torch

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def check_room(device: torch.device | str, needs: Mapping[str, int], *, what: str, advice: str, freed: int = 0) -> None:
    """Refuse an allocation that does not fit, before it is made.

    Args:
        needs: bytes, by part.
        what: the subject of the error message.
        advice: the last part of the error message.
        freed: bytes in use now that will be freed first.

    Raises:
        UserError: more than is available.
    """
    available, total = free_memory(device) + freed, sum(needs.values())
    if total > available:
        parts = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in needs.items())
        raise UserError(
            f"{what} needs {gib(total)} of memory on {device} ({parts}), and {gib(available)} are free; {advice}"
        )
