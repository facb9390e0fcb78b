"""The devices of this machine: their fingerprints and their memory."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.documents.fingerprint import Fingerprint
from autotune.errors import UserError
from autotune.machine import container

if TYPE_CHECKING:
    import torch

UNSUPPORTED = {"mps": "Apple's Metal, whose tensors have no float64", "xpu": "Intel's GPUs"}
HIDDEN = ("", "-1", "NoDevFiles")
"""Values of ``CUDA_VISIBLE_DEVICES`` that hide all GPUs on purpose: the machine counts as one without GPUs."""
UNNAMED = "gpu"  # the short name of a GPU whose driver gives none
_MIG = re.compile(r"\s+mig\s+((?:\dc\.)?\dg\.\d+gb)")
# Words of a driver's name that do not change the speed. Of the sizes of memory, 40 GB does: the A100 with it is slower.
_IGNORED = re.compile(
    r"\b(nvidia|amd|geforce|tesla|quadro|radeon|instinct|graphics|generation|gpu|oam|vf|sxm\d?|hbm\d?e?|(?!40\s*gb)\d+\s*gb)\b"
)
_VARIANTS = re.compile(r"\b(pcie|nvl|40\s*gb|laptop|max q)\b")


def fingerprint(device: str = "cpu") -> Fingerprint:
    """The fingerprint of ``cpu`` or ``cuda:N``; torch calls AMD's GPUs ``cuda`` too. Under torchrun it is that of the
    devices of all processes, which share a target.

    Raises:
        UserError: this machine has no such device.
    """
    import torch

    has_processes = torch.distributed.is_available() and torch.distributed.is_initialized()
    num_devices = torch.distributed.get_world_size() if has_processes else 1
    if device == "cpu":
        return cpu_fingerprint(usable_threads()).shared_by(num_devices)
    index = device.partition(":")[2] or "0"
    if not torch.cuda.is_available() or not index.isdigit() or int(index) >= torch.cuda.device_count():
        raise UserError(f"device {device!r} is not on this machine; it has: {', '.join(local_devices())}; choose one")
    properties = torch.cuda.get_device_properties(int(index))
    model = properties.name
    if short_name(model) == UNNAMED:  # ROCm without its table of marketing names
        model = f"{model} {getattr(properties, 'gcnArchName', '').partition(':')[0]}".strip()
    return Fingerprint(
        name=short_name(model),
        kind="cuda",
        model=model,
        num_cores=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        driver=_query_nvml()[0] if torch.version.hip is None else f"ROCm {torch.version.hip}",
    ).shared_by(num_devices)


def cpu_fingerprint(num_cores: int) -> Fingerprint:
    """The fingerprint of ``cpu`` with a number of threads; loads no torch."""
    memory_bytes, _ = container.memory()
    return Fingerprint(name="cpu", kind="cpu", model=_cpu_model(), num_cores=num_cores, memory_bytes=memory_bytes)


def usable_threads() -> int:
    """CPU threads for torch: its own setting, which follows the host, or fewer if this process may use fewer cores."""
    import torch

    return min(torch.get_num_threads(), container.num_cores())


def _cpu_model() -> str:
    """The processor as the system names it. Linux adds family, model and stepping, because cloud machines often hide
    the exact name; ARM processors have no name, but numbers of the implementer and the part.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # neither Windows nor macOS has it
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    is_arm = "CPU implementer" in fields
    keys = ("CPU implementer", "CPU part", "CPU variant") if is_arm else ("cpu family", "model", "stepping")
    return f"{fields.get('model name', platform.machine())} ({'/'.join(fields.get(key, '?') for key in keys)})"


def _sysctl(name: str) -> str:
    """A property of a macOS system; empty on other systems."""
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _query_nvml() -> tuple[str, list[str]]:
    """Version of the NVIDIA driver and names of the GPUs, or of their MIG slices; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        models = [str(pynvml.nvmlDeviceGetName(handle)) for gpu in gpus for handle in _mig_slices(gpu) or [gpu]]
    except pynvml.NVMLError:
        return "", []
    return version, models


def _mig_slices(gpu: Any) -> list[Any]:
    """NVML's handles of a GPU's MIG slices; empty without MIG."""
    import pynvml

    slices = []
    try:
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with contextlib.suppress(pynvml.NVMLError_NotFound):  # numbers of slices may have gaps
                slices.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number))
    except pynvml.NVMLError:  # the GPU or the driver knows no MIG
        return []
    return slices


def short_name(model: str) -> str:
    """The name of a GPU in commands and files: ``h200`` for ``NVIDIA H200``, ``rtx4090`` for ``NVIDIA GeForce RTX
    4090``.

    Variants of one name that differ in speed have a suffix: ``h100`` (SXM) and ``h100-pcie``, ``a100-40gb``. A MIG
    slice is named after its GPU and part, ``h100-mig-1g.10gb``.
    """
    model = model.lower().partition("/")[0]  # AMD's driver knows an MI250 as "MI250X/MI250"
    mig = _MIG.search(model)
    words = _IGNORED.sub(" ", (model[: mig.start()] if mig else model).replace("-", " "))
    variants = sorted("".join(found.split()) for found in _VARIANTS.findall(words))
    name = "-".join(["".join(_VARIANTS.sub(" ", words).split()) or UNNAMED, *reversed(variants)])
    return f"{name}-mig-{mig[1]}" if mig else name


def local_gpus() -> list[str]:
    """Short names of this machine's NVIDIA GPUs, as the driver reports them; none if they are hidden on purpose. Needs
    no torch.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN
    return [] if is_hidden else [short_name(model) for model in _query_nvml()[1]]


def gpu_fault() -> str | None:
    """Why torch can use none of the GPUs that the driver reports, and the next step; None if it uses one, or there is
    none.
    """
    import torch

    if torch.cuda.is_available() or not (names := local_gpus()):
        return None
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    try:
        torch.cuda.init()
        reason = "it finds no device"
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
    step = "install a torch whose CUDA this driver supports"
    if "No CUDA GPUs" in reason and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        reason, step = f"CUDA_VISIBLE_DEVICES is {visible!r}", "unset it"
    return (
        f"torch {torch.__version__} ({build}) cannot use {', '.join(dict.fromkeys(names))}, which driver {_query_nvml()[0]} "
        f"reports: {reason}; {step}, or choose cpu on purpose"
    )


def local_devices() -> list[str]:
    """Devices of this machine, as ``--device`` takes them."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def choose_device(name: str) -> str:
    """Resolve ``auto`` to the first GPU, or to the CPU if there is none; check any other name.

    Raises:
        UserError: this machine has no such device, or torch cannot use it.
    """
    is_cuda = re.fullmatch(r"cuda(:\d+)?", name) is not None
    if (is_cuda or name == "auto") and (fault := gpu_fault()) is not None:
        raise UserError(f"device {name!r}: {fault}")
    if name == "auto":
        return "cpu" if len(local_devices()) == 1 else "cuda:0"
    if name == "cpu" or is_cuda:
        fingerprint(name)
        return name
    check_supported(name)
    raise UserError(
        f"unknown device {name!r}; this machine has: {', '.join(local_devices())}; choose one of them, or auto"
    )


def check_supported(name: str) -> None:
    """Refuse devices that torch knows but that nothing here runs on."""
    if (reason := UNSUPPORTED.get(name.partition(":")[0])) is not None:
        raise UserError(
            f"device {name!r}: autotune runs on CPUs and on GPUs of NVIDIA and AMD, not on {reason}; choose cpu"
        )


def multiplies_bfloat16(device: torch.device | str) -> bool:
    """Whether a device has instructions for products of bfloat16: AVX-512 BF16 or AMX on a CPU, compute capability 8 on
    a GPU.
    """
    import torch

    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    capable = torch.cpu.get_capabilities()
    return bool(capable.get("avx512_bf16") or capable.get("amx_bf16"))


def gib(num_bytes: float) -> str:
    """Format a size: ``1.5 GiB``, or ``3 MiB`` below one GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def free_memory(device: torch.device | str) -> int:
    """Bytes that this process can still allocate, within the limits of its container or of torch."""
    if not str(device).startswith("cuda"):
        return container.memory()[1]
    import torch

    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    # What torch holds without using it serves new allocations, except in the private pools of CUDA graphs.
    unused = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot(include_traces=False)
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == (0, 0)
    )
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_reserved(device)
    return max(0, min(int(free), int(limit))) + unused


def check_room(device: torch.device | str, needs: Mapping[str, int], *, what: str, advice: str, freed: int = 0) -> None:
    """Refuse an allocation that does not fit, before it is made.

    Args:
        needs: bytes, by part.
        what: the subject of the error message.
        advice: the last part of the error message.
        freed: bytes in use now that will be freed first.
    """
    available, total = free_memory(device) + freed, sum(needs.values())
    if total > available:
        parts = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in needs.items())
        raise UserError(
            f"{what} needs {gib(total)} of memory on {device} ({parts}), and {gib(available)} are free; {advice}"
        )
