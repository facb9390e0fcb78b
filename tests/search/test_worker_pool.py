"""Processes beside a search: started when there is enough to do, ended with the stage, and with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.search import worker_pool
from autotune.search.worker_pool import WorkerPool

PARENT = """
import sys, time
from pathlib import Path
from autotune.search import worker_pool
from tests.search.test_worker_pool import stay

if __name__ == "__main__":
    worker_pool.MIN_REMAINING_S = 0.0
    with worker_pool.WorkerPool(1, stay, Path(sys.argv[1])) as found:
        found.report(0, 9), found.report(1, 9)
        print(found.processes[0].pid, flush=True)
        time.sleep(60)
"""


def sign(rank: int, folder: Path) -> None:
    (folder / f"{rank}").write_text(f"{os.getpid()}")


def stay(rank: int, folder: Path) -> None:
    sign(rank, folder)
    time.sleep(60)


def fail(rank: int) -> None:
    raise RuntimeError("an error of a helper")


def waited(until: Callable[[], bool], seconds: float = 30.0) -> bool:
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
    """Seconds as they are told."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    found = Clock()
    monkeypatch.setattr(worker_pool, "time", found)
    return found


def test_short_work_is_done_alone(clock: Any) -> None:
    """As far as speed tells: what was there before took no time."""
    with WorkerPool(1, fail) as found:
        for second, done in enumerate((10, 11, 12, 13, 14)):
            clock.now = float(second)
            found.report(done, 20)
        assert not found.processes
    with WorkerPool(0, fail) as found:
        for second, done in enumerate((0, 1)):
            clock.now = 100.0 * second
            found.report(done, 20)
        assert not found.processes, "as many as were asked for"


def test_helpers_work_and_end_with_the_block(clock: Any, tmp_path: Path) -> None:
    with WorkerPool(2, sign, tmp_path) as found:
        found.report(3, 99)
        clock.now = 1.0
        found.report(4, 99)
        assert len(found.processes) == 2
        found.report(5, 99)
        assert len(found.processes) == 2
        assert waited(lambda: all((tmp_path / f"{rank}").exists() for rank in (1, 2)))
    own = {(tmp_path / f"{rank}").read_text() for rank in (1, 2)}
    assert len(own) == 2 and f"{os.getpid()}" not in own
    with WorkerPool(1, stay, tmp_path) as found:
        found.report(0, 99)
        clock.now = 2.0
        found.report(1, 99)
        (process,) = found.processes
        assert process.is_alive()
    assert not process.is_alive()


def test_a_helper_that_fails_stops_nobody(clock: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with WorkerPool(1, fail) as found:
        found.report(0, 99)
        clock.now = 1.0
        found.report(1, 99)
        assert waited(lambda: not found.processes[0].is_alive())
    assert "an error of a helper" in capfd.readouterr().err


def test_a_helper_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    helper = int(parent.stdout.readline())
    assert waited(lambda: (tmp_path / "1").exists()) and is_alive(helper)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert waited(lambda: not is_alive(helper))
