"""Memory and cores that this process may use: those of its machine, or fewer in a container or a batch job.

The limits are those of the process's control groups, of version 1 and 2. A limit holds for a whole branch of the tree
of groups, so every group from the process's own to the root is read; the smallest limit counts. Inside a container, its
own group is the root.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

SYS = Path("/sys")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""By version 2 and 1: the limit, what is used, and the part of it that caches files and can be taken back."""


def proc() -> Path:
    """The folder of process information; psutil lets containers mount the folder of their host elsewhere."""
    return Path(getattr(psutil, "PROCFS_PATH", "/proc"))


def text_of(path: Path) -> str:
    """The contents of a file of the system; empty if there is none."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def memory() -> tuple[int, int]:
    """Bytes of main memory that this process may use, and those of them that are free. Cached files count as free."""
    host = psutil.virtual_memory()
    total, free = [int(host.total)], [int(host.available)]
    for group in _groups("memory"):
        for limit_file, used_file, cached in _MEMORY_FILES:
            limit, used = text_of(group / limit_file).strip(), text_of(group / used_file).strip()
            if limit.isdigit() and used.isdigit():
                can_be_freed = re.search(rf"^{cached} (\d+)$", text_of(group / "memory.stat"), re.MULTILINE)
                total.append(int(limit))
                free.append(max(0, int(limit) - int(used) + (int(can_be_freed[1]) if can_be_freed else 0)))
    return min(total), min(free)


def num_cores() -> int:
    """Number of cores that this process may keep busy: those that it is pinned to, or fewer by a quota, rounded up."""
    pinned = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = [pinned]
    for group in _groups("cpu"):
        period_file = text_of(group / "cpu.cfs_period_us")
        for quota in (text_of(group / "cpu.max"), f"{text_of(group / 'cpu.cfs_quota_us').strip()} {period_file}"):
            if found := re.fullmatch(r"(\d+) ([1-9]\d*)\s*", quota):  # not "max", nor -1
                cores.append(math.ceil(int(found[1]) / int(found[2])))
    return max(1, min(cores))


def throttled_s() -> float | None:
    """Time in which a limit on the CPU has stopped this process; None where no control group reports it."""
    times = []
    for group in _groups("cpu"):
        fields = dict(re.findall(r"^(\w+) (\d+)$", text_of(group / "cpu.stat"), re.MULTILINE))
        times += [
            int(fields[name]) / unit
            for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9))
            if name in fields
        ]
    return max(times, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups of this process that may have files of a controller, up to the root."""
    lines = text_of(proc() / "self" / "cgroup")
    for controllers, path in re.findall(r"^\d+:([^:\n]*):(/.*)$", lines, re.MULTILINE):
        if controllers == "" or controller in controllers.split(","):
            own = PurePosixPath(path.lstrip("/"))
            for folder in (own, *own.parents):
                yield SYS / "fs" / "cgroup" / controllers / folder
