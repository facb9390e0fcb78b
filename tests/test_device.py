"""Devices are named the same way everywhere, and one that is not here is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotune import device as device_module
from autotune.cost.table import shipped_tables
from autotune.device import choose_device, fingerprint, local_devices, short_name
from autotune.errors import UserError


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA Graphics", "gpu"),  # a name of which nothing is left
    ],
)
def test_short_names(model: str, name: str) -> None:
    """Those that datasheets and shipped tables are filed under."""
    assert short_name(model) == name


def test_the_cpu_has_a_fingerprint() -> None:
    found = fingerprint("cpu")
    assert (found.name, found.kind, found.num_cores) == ("cpu", "cpu", torch.get_num_threads())
    assert found.memory_bytes > 1 << 28 and found.model
    assert found.key == f"cpu/{found.model}/{found.num_cores}" == fingerprint("cpu").key


def test_another_number_of_threads_is_another_device() -> None:
    """Latencies measured on one thread say nothing about four."""
    here = fingerprint("cpu")
    assert here.model_copy(update={"num_cores": 99}).key != here.key


def test_a_device_that_is_here_is_chosen() -> None:
    assert choose_device("cpu") == "cpu"
    assert choose_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert local_devices()[0] == "cpu"


@pytest.mark.parametrize("name", ["cuda:99", "cuda:999"])
def test_a_gpu_that_is_not_here_is_refused(name: str) -> None:
    for ask in (choose_device, fingerprint):
        with pytest.raises(UserError, match=rf"device '{name}' is not on this machine; it has: cpu.*choose one"):
            ask(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="device 'cuda' is not on this machine; it has: cpu; choose one of them"):
        choose_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "CPU", "", "h100"])
def test_what_names_no_device_is_refused(name: str) -> None:
    with pytest.raises(
        UserError, match=f"unknown device '{name}'; this machine has: cpu.*; choose one of them, or auto"
    ):
        choose_device(name)


def test_shipped_tables_are_found_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "data_root", lambda: tmp_path)
    assert shipped_tables() == {}
    for name in ("h100/a.cost.json", "h100/b.cost.json", "cpu/a.cost.json", "cpu/a.decode.json", "devices/h100.yaml"):
        path = tmp_path / "profiles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    found = {name: [path.name for path in paths] for name, paths in shipped_tables().items()}
    assert found == {"cpu": ["a.cost.json"], "h100": ["a.cost.json", "b.cost.json"]}
