"""Device names and fingerprints, and the check that an allocation fits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autotune.device import check_room, choose_device, fingerprint, free_memory, gib, local_devices, short_name
from autotune.errors import UserError
from autotune.modeling.loading import load_model
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from tests.tiny_models import Pair

GIB = 2**30
FREE_MEMORY = "autotune.device.free_memory"


def test_short_names() -> None:
    """Datasheets and shipped tables are filed under these names."""
    for model, name in {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100 80GB PCIe": "a100",
        "NVIDIA A10": "a10",
        "NVIDIA L40S": "l40s",
        "Tesla T4": "t4",
        "Tesla V100-SXM2-16GB": "v100",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 3090": "rtx3090",
        "NVIDIA Graphics": "gpu",  # nothing else is left of the name
    }.items():
        assert short_name(model) == name


def test_fingerprint_of_the_cpu() -> None:
    here = fingerprint("cpu")
    assert (here.name, here.kind, here.num_cores) == ("cpu", "cpu", torch.get_num_threads())
    assert here.memory_bytes > 1 << 28 and here.model
    assert here.key == f"cpu/{here.model}/{here.num_cores}" == fingerprint("cpu").key
    assert here.model_copy(update={"num_cores": 99}).key != here.key, "latency depends on the number of threads"


def test_local_devices_can_be_chosen() -> None:
    assert choose_device("cpu") == "cpu"
    assert choose_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert local_devices()[0] == "cpu"


def test_missing_gpu_is_refused() -> None:
    for name in ("cuda:99", "cuda:999", *([] if torch.cuda.is_available() else ["cuda"])):
        for function in (choose_device, fingerprint):
            with pytest.raises(UserError, match=rf"device '{name}' is not on this machine; it has: cpu.*; choose one"):
                function(name)


def test_unknown_device_name_is_refused() -> None:
    for name in ("gpu", "cuda:x", "cuda:-1", "CPU", "", "h100"):
        message = f"unknown device '{name}'; this machine has: cpu.*; choose one of them, or auto"
        with pytest.raises(UserError, match=message):
            choose_device(name)


def test_gpus_are_listed_without_torch() -> None:
    script = "import sys; from autotune.device import local_gpus; print(len(local_gpus())); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == torch.cuda.device_count()


# --------------------------------------------------------------------------------------------------------------- memory


def test_sizes_are_formatted() -> None:
    assert [gib(num_bytes) for num_bytes in (3 * 2**20, 1.5 * GIB)] == ["3 MiB", "1.5 GiB"]


def test_free_memory_is_less_than_all_memory() -> None:
    assert 0 < free_memory("cpu") < fingerprint("cpu").memory_bytes


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


def test_weights_that_do_not_fit_are_not_loaded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FREE_MEMORY, lambda device: 1000)
    with pytest.raises(UserError, match=r"needs \d+ MiB of memory on cpu \(weights \d+ MiB\), and 0 MiB are free"):
        load_model(str(pair.target_folder))


def test_kv_bytes_per_token(pair: Pair) -> None:
    target = Target(pair.target)
    assert target.kv_bytes_per_token == 2 * len(target.text.layers) * 2 * target.text.config.head_dim * 4
