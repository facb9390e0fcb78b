"""Measures contention while something is timed, and waits until a machine is idle.

Every source may be missing, as in containers and on systems other than Linux; its figure is then None.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from typing import Any

import psutil

from autotune.console import Console
from autotune.documents.contention import Contention
from autotune.machine import container
from autotune.machine.container import proc, text_of, throttled_s

BUSY = ("user", "nice", "system", "irq", "softirq")  # of psutil.cpu_times; guests are part of user
# Bits of NVML's clock event reasons that mean a slower clock than the GPU was set to.
THROTTLE_REASONS = {0x4: "power", 0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power"}
IDLE_SECONDS = 3  # in a row
POLL_S = 1.0


Counters = dict[str, float | None]
"""Counters that only grow, by name: seconds, and numbers of throttles; None for one that this machine lacks."""


class ContentionMonitor:
    """Measures the contention of the time from its creation to the call of ``contention``, in which ``device`` is
    timed.
    """

    def __init__(self, device: str = "cpu", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._clock = device, clock
        self._reasons = _gpu_state(device)[1]
        self._started, self._started_at = _read_counters(), clock()

    def contention(self) -> Contention:
        """The contention until now."""
        first, last = self._started, _read_counters()
        seconds = self._clock() - self._started_at

        def growth(name: str) -> float | None:
            before, after = first[name], last[name]
            return None if before is None or after is None else max(0.0, after - before)

        def rate(name: str) -> float | None:
            grown = growth(name)
            return None if grown is None else grown / max(seconds, 1e-9)

        own_cores, all_cores, throttles = rate("own") or 0.0, rate("busy"), growth("throttles")
        gpu_processes, reasons = _gpu_state(self._device)
        return Contention(
            seconds=seconds,
            num_cores=psutil.cpu_count() or 1,
            own_cores=own_cores,
            other_cores=None if all_cores is None else max(0.0, all_cores - own_cores),
            stolen_cores=rate("stolen"),
            cpu_pressure=rate("waiting"),
            load_average=psutil.getloadavg()[0],
            throttled=rate("throttled"),
            thermal_throttles=None if throttles is None else int(throttles),
            gpu_processes=gpu_processes,
            gpu_throttle_reasons=tuple(sorted(self._reasons | reasons)),
        )


def wait_until_idle(
    limit_s: float,
    device: str,
    console: Console,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until others have used little of the machine for ``IDLE_SECONDS`` in a row, at most ``limit_s`` seconds.
    Returns the seconds waited; whether the machine became idle is printed.
    """
    started = clock()
    whole = ContentionMonitor(device, clock=clock)
    num_idle = 0
    while num_idle < IDLE_SECONDS and clock() - started < limit_s:
        monitor = ContentionMonitor(device, clock=clock)
        sleep(min(POLL_S, max(0.0, limit_s - (clock() - started))))
        num_idle = 0 if monitor.contention().is_busy else num_idle + 1
    waited_s = clock() - started
    if num_idle >= IDLE_SECONDS:
        console.say(f"the machine is idle after {waited_s:.0f} s")
    else:
        seen = whole.contention().describe("meanwhile")
        console.say(f"the machine did not become idle within {waited_s:.0f} s, and the work begins now: {seen}")
    return waited_s


def _read_counters() -> Counters:
    cpu_times = _cpu_times()
    waiting = re.search(r"^some .*total=(\d+)", text_of(proc() / "pressure" / "cpu"), re.MULTILINE)
    thermal = [
        int(text)
        for path in container.SYS.glob("devices/system/cpu/cpu*/thermal_throttle/core_throttle_count")
        if (text := text_of(path).strip()).isdigit()
    ]
    return {
        "own": _own_cpu_s(),
        "busy": None if cpu_times is None else sum(getattr(cpu_times, name, 0.0) for name in BUSY),
        "stolen": getattr(cpu_times, "steal", None),
        "waiting": None if waiting is None else int(waiting[1]) / 1e6,
        "throttled": throttled_s(),
        "throttles": sum(thermal) if thermal else None,
    }


def _cpu_times() -> Any | None:
    """Seconds of all cores together, by kind."""
    try:
        return psutil.cpu_times()
    except (OSError, ValueError, IndexError, RuntimeError):
        return None


def _own_cpu_s() -> float:
    """CPU time of this process and its descendants, user and system, those that have ended included; under torchrun, of
    all of its processes.
    """
    seconds = 0.0
    with contextlib.suppress(psutil.Error, OSError):
        first = psutil.Process(os.getppid() if "LOCAL_RANK" in os.environ else None)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                times = process.cpu_times()
                children_s = getattr(times, "children_user", 0) + getattr(times, "children_system", 0)
                seconds += times.user + times.system + children_s
    return seconds


def _gpu_state(device: str) -> tuple[int | None, set[str]]:
    """Number of other processes on a GPU, and why it runs slowly now; (None, no reason) for the CPU and without
    NVML.
    """
    if not device.startswith("cuda"):
        return None, set()
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()  # as often as one likes; it ends with the process
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pids = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (pynvml.NVMLError, RuntimeError):
        return None, set()
    # In a container, NVML may know this process by a number of the host: then one of the processes is this one.
    num_own = 1 if os.getpid() in pids or torch.cuda.is_initialized() else 0
    return max(0, len(pids) - num_own), {reason for bit, reason in THROTTLE_REASONS.items() if bits & bit}
