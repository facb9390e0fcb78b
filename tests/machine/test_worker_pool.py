"""Workers are started for enough work, and end with their stage or their parent."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.machine import worker_pool
from autotune.machine.worker_pool import WorkerPool

PARENT = """
import sys, time
from pathlib import Path
from autotune.machine import worker_pool
from tests.machine.test_worker_pool import stay

if __name__ == "__main__":
    worker_pool.MIN_REMAINING_S = 0.0
    with worker_pool.WorkerPool(1, stay, Path(sys.argv[1])) as pool:
        pool.report(0, 9), pool.report(1, 9)
        print(pool.processes[0].pid, flush=True)
        time.sleep(3600)
"""


CHATTY = logging.getLogger("autotune.tests.chatty")


def sign(rank: int, folder: Path) -> None:
    (folder / f"{rank}").write_text(f"{os.getpid()}")
    if not CHATTY.isEnabledFor(logging.INFO):
        (folder / f"{rank} logs as its parent").touch()


def stay(rank: int, folder: Path) -> None:
    sign(rank, folder)
    time.sleep(3600)


def fail(rank: int) -> None:
    raise RuntimeError("an error of a worker")


def waited(until: Callable[[], bool], seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.05)
    return until()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that the test sets."""

    settable = SimpleNamespace(now=0.0, monotonic=lambda: settable.now)
    monkeypatch.setattr(worker_pool, "time", settable)
    return settable


def start(pool: WorkerPool, clock: Any) -> None:
    """Report work that takes long enough for workers."""
    pool.report(0, 99)
    clock.now += 1.0
    pool.report(1, 99)


@pytest.mark.parametrize(
    ("num_workers", "deadline", "reports"),
    [
        (1, math.inf, {0: (10, 20), 1: (11, 20), 2: (12, 20), 3: (13, 20)}),  # 10 pieces were found on disk
        (0, math.inf, {0: (0, 20), 100: (1, 20)}),
        (1, 25.0, {0: (0, 99), 1: (1, 99)}),  # 24 s are left for 98 s of work
    ],
)
def test_no_workers_start_for_short_work(
    clock: Any, num_workers: int, deadline: float, reports: dict[int, tuple[int, int]]
) -> None:
    with WorkerPool(num_workers, fail, deadline=deadline) as pool:
        for second, (done, of) in reports.items():
            clock.now = float(second)
            pool.report(done, of)
        assert not pool.processes


def test_workers_run_the_task_and_end_with_the_block(
    clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHATTY, "level", logging.ERROR)
    with WorkerPool(2, sign, tmp_path) as pool:
        start(pool, clock)
        assert len(pool.processes) == 2
        pool.report(5, 99)
        assert len(pool.processes) == 2
        assert waited(lambda: all((tmp_path / f"{rank}").exists() for rank in (1, 2)))
    own = {(tmp_path / f"{rank}").read_text() for rank in (1, 2)}
    assert len(own) == 2 and f"{os.getpid()}" not in own
    assert waited(lambda: all((tmp_path / f"{rank} logs as its parent").exists() for rank in (1, 2)))
    with WorkerPool(1, stay, tmp_path) as pool:
        start(pool, clock)
        (process,) = pool.processes
        assert process.is_alive()
    assert not process.is_alive()


def test_failed_worker_does_not_stop_the_search(clock: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with WorkerPool(1, fail) as pool:
        start(pool, clock)
        assert waited(lambda: not pool.processes[0].is_alive())
    assert "an error of a worker" in capfd.readouterr().err


def test_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert waited(lambda: (tmp_path / "1").exists()) and is_alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert waited(lambda: not is_alive(worker))
