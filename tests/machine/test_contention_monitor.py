"""Contention from counters in fake /proc and /sys folders, and waiting with a simulated clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from autotune.console import Console
from autotune.documents.contention import Contention
from autotune.machine import container, contention_monitor
from autotune.machine.contention_monitor import ContentionMonitor, wait_until_idle

GROUP = "4:cpu,cpuacct:/box\n0::/\n"


class FakeMachine:
    """Two cores. ``pass_time`` advances the clock and the counters."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = self.own_s = 0.0
        self.ticks = {"user": 0.0, "idle": 0.0, "steal": 0.0}
        self.pressure_us = self.throttled_ns = self.throttles = 0
        self.proc, self.sys = folder / "proc", folder / "sys"
        self.group = self.sys / "fs/cgroup/cpu,cpuacct/box"
        self.core = self.sys / "devices/system/cpu/cpu0/thermal_throttle"
        for path in (self.proc / "pressure", self.proc / "self", self.group, self.core):
            path.mkdir(parents=True)
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(self.proc))
        monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
        monkeypatch.setattr(container, "SYS", self.sys)
        monkeypatch.setattr(contention_monitor, "_own_cpu_s", lambda: self.own_s)
        self.write()

    def write(self) -> None:
        user, idle, steal = (int(100 * self.ticks[name]) for name in ("user", "idle", "steal"))
        (self.proc / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0\n")
        (self.proc / "pressure/cpu").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={self.pressure_us}\n")
        (self.proc / "self/cgroup").write_text(GROUP)
        (self.group / "cpu.stat").write_text(f"nr_periods 9\nnr_throttled 3\nthrottled_time {self.throttled_ns}\n")
        (self.core / "core_throttle_count").write_text(f"{self.throttles}\n")

    def pass_time(self, seconds: float, *, own: float = 0.0, others: float = 0.0, stolen: float = 0.0) -> None:
        """``own``, ``others`` and ``stolen`` are cores."""
        self.seconds += seconds
        self.own_s += own * seconds
        self.ticks["user"] += (own + others) * seconds
        self.ticks["steal"] += stolen * seconds
        self.write()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(tmp_path, monkeypatch)


def measured(machine: FakeMachine, change: Callable[[], None]) -> Contention:
    monitor = ContentionMonitor(clock=lambda: machine.seconds)
    change()
    return monitor.contention()


def test_cores_are_told_apart(machine: FakeMachine) -> None:
    def change() -> None:
        machine.pressure_us, machine.throttled_ns, machine.throttles = 3_100_000, 500_000_000, 2
        machine.pass_time(10, own=0.9, others=0.6, stolen=0.2)

    found = measured(machine, change)
    assert (found.seconds, found.num_cores) == (10, 2)
    assert found.own_cores == pytest.approx(0.9) and found.other_cores == pytest.approx(0.6)
    assert found.stolen_cores == pytest.approx(0.2) and found.cpu_pressure == pytest.approx(0.31)
    assert found.throttled == pytest.approx(0.05) and found.thermal_throttles == 2
    assert found.is_busy
    assert found.describe("while steps were timed") == (
        "other processes used 0.6 of 2 cores while steps were timed; other virtual machines took 0.2 cores; "
        "CPU pressure 31 %; stopped by the CPU limit for 5 % of the time; times that cores were slowed down by heat: 2"
    )


def test_own_work_is_no_contention(machine: FakeMachine) -> None:
    """This process keeps both cores busy, and its threads wait for each other."""

    def change() -> None:
        machine.pressure_us = 5_000_000
        machine.pass_time(10, own=2.0)

    assert not measured(machine, change).is_busy


@pytest.mark.parametrize("missing", ["stat", "pressure/cpu", "self/cgroup"])
def test_missing_sources_are_none(machine: FakeMachine, missing: str) -> None:
    def change() -> None:
        machine.pass_time(5, others=1.0)
        (machine.proc / missing).unlink()

    found = measured(machine, change)
    figures = {"stat": found.other_cores, "pressure/cpu": found.cpu_pressure, "self/cgroup": found.throttled}
    assert [name for name, value in figures.items() if value is None] == [missing]
    unknown = "other processes used an unknown number of 2 cores during it"
    assert (unknown in found.describe("during it")) == (missing == "stat")


def test_pressure_decides_where_cores_are_unknown() -> None:
    unknown = Contention(seconds=1, num_cores=2, own_cores=1)
    assert not unknown.is_busy
    assert unknown.model_copy(update={"cpu_pressure": 0.2}).is_busy
    assert not unknown.model_copy(update={"cpu_pressure": 0.2, "other_cores": 0.0}).is_busy
    assert not Contention(seconds=1, num_cores=64, own_cores=1, other_cores=3.0).is_busy
    assert Contention(seconds=1, num_cores=2, own_cores=1, other_cores=0.2).is_busy


def test_children_are_this_process_too() -> None:
    """The CPU time of a child counts as our own while it runs and after it has ended."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = contention_monitor._own_cpu_s()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert contention_monitor._own_cpu_s() - before >= 0.25
        child.communicate(b"\n")
    assert contention_monitor._own_cpu_s() - before >= 0.25


def test_other_processes_and_heat_of_a_gpu_are_described() -> None:
    """Beside what the other fields say."""
    found = Contention(seconds=40, num_cores=2, own_cores=1.25, gpu_processes=1, gpu_throttle_reasons=("heat",))
    assert "other processes on the GPU: 1; GPU slowed down by heat" in found.describe("meanwhile")


def test_other_processes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, one of which is this one under a number of the host; the clock is limited by heat and idleness."""
    import pynvml

    fakes: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=-1), SimpleNamespace(pid=-2)],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x21,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = ContentionMonitor("cuda:0").contention()
    assert found.gpu_processes == 1 and found.gpu_throttle_reasons == ("heat",) and found.is_busy

    def fail(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", fail)
    assert ContentionMonitor("cuda:0").contention().gpu_processes is None


# -------- waiting


def waited(machine: FakeMachine, others: Callable[[float], float], limit_s: float) -> float:
    def sleep(seconds: float) -> None:
        machine.pass_time(seconds, others=others(machine.seconds))

    return wait_until_idle(limit_s, "cpu", Console(), clock=lambda: machine.seconds, sleep=sleep)


def test_waiting_ends_when_the_machine_is_idle(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    """Two quiet seconds between bursts are not enough; from the ninth second on nothing else runs."""
    assert waited(machine, lambda now: 1.0 if now < 9 and now % 3 == 0 else 0.0, 60.0) == 10.0
    assert capsys.readouterr().err == "the machine is idle after 10 s\n"


def test_waiting_ends_at_the_limit(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    assert waited(machine, lambda now: 0.8, 7.5) == 7.5
    assert capsys.readouterr().err == (
        "the machine did not become idle within 8 s, and the work begins now: "
        "other processes used 0.8 of 2 cores meanwhile; CPU pressure 0 %\n"
    )


@pytest.mark.parametrize("is_rank", [True, False])
def test_the_other_processes_of_torchrun_are_own_work(is_rank: bool) -> None:
    """A rank, whose sibling has computed for a second."""
    measure = "from autotune.machine import contention_monitor as m; print(m._own_cpu_s() - sum(m.os.times()[:2]))"
    agent = (
        "import psutil, subprocess, sys, time\n"
        "sibling = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "while psutil.Process(sibling.pid).cpu_times().user < 1: time.sleep(0.05)\n"
        f"print(subprocess.run([sys.executable, '-c', {measure!r}], capture_output=True, text=True).stdout)\n"
        "sibling.kill()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    environment |= {"LOCAL_RANK": "0"} if is_rank else {}
    ran = subprocess.run([sys.executable, "-c", agent], env=environment, capture_output=True, text=True, check=True)
    assert (float(ran.stdout) >= 1.0) == is_rank
