"""Limits of containers, from fake /proc and /sys folders."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from autotune.machine import container
from autotune.machine.device import fingerprint, free_memory, usable_threads
from autotune.modeling.host import limited_threads

GIB, MIB = 1 << 30, 1 << 20
V1 = "memory/box/memory"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 32 cores and 64 GiB, 48 of them free; the process is in group ``/box`` of version 1 and 2."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=48 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)
    monkeypatch.setattr(container, "SYS", tmp_path / "sys")
    groups = tmp_path / "proc/self/cgroup"
    groups.parent.mkdir(parents=True)
    groups.write_text("4:cpu,cpuacct:/box\n3:memory:/box\n0::/box/job\n")
    return tmp_path / "sys/fs/cgroup"


def write(host: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (host / name).parent.mkdir(parents=True, exist_ok=True)
        (host / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (64 * GIB, 48 * GIB)),
        ({"memory.max": "max\n", "memory.current": "7"}, (64 * GIB, 48 * GIB)),
        ({"memory.max": f"{GIB}\n", "memory.current": f"{300 * MIB}\n"}, (GIB, 724 * MIB)),
        (  # files that are cached can be taken back
            {"memory.max": f"{GIB}", "memory.current": f"{GIB}", "memory.stat": f"anon 7\ninactive_file {90 * MIB}\n"},
            (GIB, 90 * MIB),
        ),
        (  # the parent of the process's own group has the smaller limit
            {
                **{"box/job/memory.max": f"{4 * GIB}", "box/job/memory.current": f"{GIB}"},
                **{"box/memory.max": f"{2 * GIB}", "box/memory.current": f"{GIB}"},
            },
            (2 * GIB, GIB),
        ),
        ({f"{V1}.limit_in_bytes": f"{GIB}", f"{V1}.usage_in_bytes": f"{300 * MIB}"}, (GIB, 724 * MIB)),
        ({f"{V1}.limit_in_bytes": f"{2**63 - 4096}", f"{V1}.usage_in_bytes": "7"}, (64 * GIB, 48 * GIB)),
        ({f"{V1}.limit_in_bytes": "100", f"{V1}.usage_in_bytes": "300"}, (100, 0)),
    ],
)
def test_memory_is_what_the_container_leaves(files: dict[str, str], expected: tuple[int, int], host: Path) -> None:
    write(host, files)
    assert container.memory() == expected
    assert (fingerprint("cpu").memory_bytes, free_memory("cpu")) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 32),
        ({"cpu.max": "max 100000\n"}, 32),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"box/job/cpu.max": "800000 100000", "box/cpu.max": "250000 100000"}, 3),
        ({"cpu,cpuacct/box/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 32),
        ({"cpu.max": "9900000 100000"}, 32),
    ],
)
def test_cores_are_those_of_the_quota(files: dict[str, str], expected: int, host: Path) -> None:
    """Threads, workers and the fingerprint follow."""
    write(host, files)
    assert container.num_cores() == expected
    with limited_threads(16):
        assert usable_threads() == fingerprint("cpu").num_cores == min(16, expected)
    with limited_threads(1):
        assert usable_threads() == 1 == torch.get_num_threads()


def test_a_limit_of_a_parent_throttles_too(host: Path) -> None:
    assert container.throttled_s() is None
    write(host, {"box/job/cpu.stat": "throttled_usec 1000\n", "box/cpu.stat": "throttled_usec 3000000\n"})
    assert container.throttled_s() == 3.0
