"""Which device this is, as far as latency is concerned."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from autotune.errors import UserError
from autotune.files import Document, data_root


class Fingerprint(Document):
    """A device by everything that decides its speed. Two documents are comparable if ``key`` is equal."""

    name: str
    """Short, for people and file names: ``cpu``, ``h200``."""
    kind: str
    """``cpu`` or ``cuda``."""
    model: str
    """As the system names it."""
    num_cores: int
    """Threads that torch uses, or the GPU's multiprocessors."""
    memory_bytes: int
    driver: str = ""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.model}/{self.num_cores}"


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


def shipped_tables() -> dict[str, list[Path]]:
    """Cost tables in ``profiles/<device>/``, by device name."""
    tables: dict[str, list[Path]] = {}
    for path in sorted((data_root() / "profiles").glob("*/*.cost.json")):
        tables.setdefault(path.parent.name, []).append(path)
    return tables
