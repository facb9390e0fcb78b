"""Device names and fingerprints, and the check that an allocation fits."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from autotune.errors import UserError
from autotune.machine.device import check_room, choose_device, fingerprint, free_memory, local_gpus, short_name
from autotune.runtime.decoder import Decoder
from autotune.study.search_settings import device_for
from tests.tiny_models import Pair

GIB = 2**30
FREE_MEMORY = "autotune.machine.device.free_memory"


def test_short_names() -> None:
    """Datasheets and shipped tables are filed under these names."""
    # fmt: off
    for model, name in {
        "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H100 NVL": "h100-nvl", "NVIDIA H100 80GB HBM3 MIG 1g.10gb": "h100-mig-1g.10gb",
        "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb": "h100-mig-1c.3g.40gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb+me": "a100-40gb-mig-1g.5gb", "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100 80GB PCIe": "a100-pcie", "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
        "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA B200": "b200", "NVIDIA GB200": "gb200", "NVIDIA H20": "h20",
        "NVIDIA L4": "l4", "NVIDIA A10": "a10", "NVIDIA L40S": "l40s", "Tesla T4": "t4",
        "Tesla V100-SXM2-16GB": "v100", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GeForce RTX 3090": "rtx3090",
        "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx4090-laptop", "NVIDIA GeForce RTX 5090": "rtx5090",
        "NVIDIA RTX 6000 Ada Generation": "rtx6000ada", "Quadro RTX 8000": "rtx8000", "AMD Instinct MI300X": "mi300x",
        "AMD Instinct MI300X VF": "mi300x", "AMD Instinct MI325X OAM": "mi325x",
        "AMD Instinct MI250X/MI250": "mi250x", "AMD Radeon RX 7900 XTX": "rx7900xtx",
        "AMD Radeon Graphics gfx942": "gfx942",
        "NVIDIA Graphics": "gpu",  # nothing else is left of the name
    }.items():
        # fmt: on
        assert short_name(model) == name


def test_fingerprint_of_the_cpu() -> None:
    here = fingerprint("cpu")
    assert (here.name, here.kind, here.num_cores) == ("cpu", "cpu", torch.get_num_threads())
    assert here.memory_bytes > 1 << 28 and here.model
    assert here.key == f"cpu/{here.model}/{here.num_cores}" == fingerprint("cpu").key
    assert here.model_copy(update={"num_cores": 99}).key != here.key, "latency depends on the number of threads"


class Properties(SimpleNamespace):
    """``torch.cuda.get_device_properties`` of a GPU that this machine does not have."""

    multi_processor_count = 304
    total_memory = 192 << 30


def test_fingerprint_of_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = Properties(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    found = fingerprint("cuda:0")
    assert (found.name, found.model, found.driver) == ("mi300x", "AMD Instinct MI300X", "ROCm 7.2.1")
    properties.name = "AMD Radeon Graphics"
    assert fingerprint("cuda:0").model == "AMD Radeon Graphics gfx942" and fingerprint("cuda:0").name == "gfx942"


def test_mig_slices_are_listed_in_place_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slices have the numbers 0 and 2."""
    import pynvml

    def slice_of(gpu: str, number: int) -> str:
        if number == 1:
            raise pynvml.NVMLError_NotFound
        return f"{gpu} MIG {number + 1}g.{10 * (number + 1)}gb"

    def num_slices(gpu: str) -> int:
        if "H100" not in gpu:
            raise pynvml.NVMLError_NotSupported
        return 3

    gpus = ["NVIDIA H100 80GB HBM3", "NVIDIA L4"]
    for name, stub in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": gpus.__getitem__,
        "nvmlDeviceGetName": str,
        "nvmlDeviceGetMaxMigDeviceCount": num_slices,
        "nvmlDeviceGetMigDeviceHandleByIndex": slice_of,
    }.items():
        monkeypatch.setattr(pynvml, name, stub)
    assert local_gpus() == ["h100-mig-1g.10gb", "h100-mig-3g.30gb", "l4"]


@pytest.fixture
def unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that the driver reports and torch cannot use."""
    monkeypatch.setattr("autotune.machine.device._query_nvml", lambda: ("580.1", ["NVIDIA H100 80GB HBM3"] * 2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("cuda", "error", "message"),
    [
        (
            None,
            "Not compiled with CUDA",
            r"\(built without CUDA\) .*: Not compiled with CUDA; install a torch whose CUDA",
        ),
        ("13.0", "Too old (found 12020). Please", r"\(CUDA 13.0\) .*: Too old \(found 12020\); install a torch whose"),
        ("13.0", "No CUDA GPUs are available", r"\(CUDA 13.0\) .*: CUDA_VISIBLE_DEVICES is '7'; unset it, or choose"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_refused_with_the_reason(
    unusable: None, monkeypatch: pytest.MonkeyPatch, cuda: str | None, error: str, message: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(error)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for name, given in (("auto", (None, "auto")), ("cuda:1", (None, "cuda:1")), ("h100", ("h100", "auto"))):
        with pytest.raises(UserError, match=rf"{name}'?: torch .*{message}"):
            device_for(*given)
    assert device_for(None, "cpu") == "cpu" and device_for("a100") is None, "an estimate for a GPU that is not here"


def test_a_hidden_gpu_is_no_estimate_unless_all_are_hidden_on_purpose(
    unusable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == "cpu" and device_for("h100") is None and local_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # a GPU of another name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="--gpu h100: CUDA_VISIBLE_DEVICES hides it from torch; unset that"):
        device_for("h100")


def test_fingerprint_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has neither /proc nor sysctl nor os.sysconf; macOS has sysctl."""

    def missing(self: Path) -> str:
        raise FileNotFoundError

    def run(words: list[str], **options: Any) -> Any:
        if platform.system() == "Windows":
            raise FileNotFoundError(words[0])
        return subprocess.CompletedProcess(words, 0, stdout="Apple M3 Max\n")

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr("autotune.machine.device.subprocess.run", run)
    intel = "Intel64 Family 6 Model 167 Stepping 1, GenuineIntel"
    for system, processor, model in (("Darwin", "arm", "Apple M3 Max"), ("Windows", intel, intel)):
        monkeypatch.setattr(platform, "system", lambda system=system: system)
        monkeypatch.setattr(platform, "processor", lambda processor=processor: processor)
        found = fingerprint("cpu")
        assert found.model == model and found.memory_bytes > 0


def test_arm_processors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/cpuinfo of Linux on ARM has no name."""
    text = "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert fingerprint("cpu").model == "aarch64 (0x41/0xd4f/0x0)"


def test_devices_that_are_not_here_are_refused() -> None:
    absent = ["cuda:99", "cuda:999", *([] if torch.cuda.is_available() else ["cuda"])]
    for names, message in (
        (["mps", "mps:0", "xpu"], "device '{}': autotune runs on CPUs and on GPUs .*; choose cpu"),
        (absent, "device '{}' is not on this machine; it has: cpu.*; choose one"),
        (["gpu", "cuda:x", "cuda:-1", "CPU", "", "h100"], "unknown device '{}'; .* cpu.*; choose one of them, or auto"),
    ):
        for name in names:
            with pytest.raises(UserError, match=message.format(name)):
                choose_device(name)
    with pytest.raises(UserError, match="is not on this machine"):
        fingerprint("cuda:99")


# -------- memory


def test_allocation_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FREE_MEMORY, lambda device: 4 * GIB)
    needs = {"weights": 3 * GIB, "cache": 2 * GIB}
    check_room("cpu", needs, what="it", advice="use less", freed=GIB)
    with pytest.raises(UserError) as error:
        check_room("cpu", needs, what="it", advice="use less")
    assert str(error.value) == (
        "it needs 5.0 GiB of memory on cpu (weights 3.0 GiB, cache 2.0 GiB), and 4.0 GiB are free; use less"
    )


def test_kv_cache_that_does_not_fit_is_not_allocated(text_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(text_pair.target)
    text = decoder.target.text
    per_token = 2 * len(text.layers) * text.config.num_key_value_heads * text.config.head_dim * 4
    inputs = {"input_ids": torch.arange(1100)[None] % 40 + 5}
    before = decoder.target.cache
    monkeypatch.setattr(FREE_MEMORY, lambda device: 1000 * per_token)
    with pytest.raises(UserError, match=r"a sequence of 11\d\d tokens needs .* MiB of memory on cpu \(cache"):
        decoder.generate(**inputs, max_new_tokens=20)
    assert decoder.target.cache is before
    monkeypatch.undo()
    decoder.generate(**inputs, max_new_tokens=2)
    assert decoder.target.cache.memory_bytes == per_token * decoder.target.cache.capacity


def test_free_memory_leaves_out_what_only_graphs_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it count the other device's."""
    segments = [
        {"device": device, "segment_pool_id": pool, "total_size": 100, "allocated_size": 100 - unused}
        for device, pool, unused in ((0, (0, 0), 30), (0, (0, 7), 50), (1, (0, 0), 20))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    fraction = Mock(return_value=1.0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction)
    assert [free_memory(name) for name in ("cuda:0", "cuda:1", "cuda")] == [1030, 1020, 1020]
    fraction.return_value = 0.25  # of 2000 bytes, of which 200 are reserved
    assert free_memory("cuda:0") == 330
