"""A process of ``torchrun`` that is killed ends all of them, and the same command goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.families import FAMILIES
from tests.sharded.processes import save_family

MOMENTS = 10
LONGEST_S = 20.0  # until all processes have ended


def _children(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False)
    return [int(child) for child in listed.stdout.split()]


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all_and_the_command_goes_on(tmp_path: Path, rank: int) -> None:
    """At ten moments of a recording; then the command runs to its end."""
    save_family(FAMILIES["llama"], tmp_path)
    pair = ["--target", "target", "--draft", "draft", "--workload", "chat", "--prompts", "12", "-o", "traces"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autotune", "record", *pair]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    for moment in range(MOMENTS + 1):
        with subprocess.Popen(launch, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as agent:
            if moment == 0:  # how long an uninterrupted command takes, of other traces
                assert agent.wait() == 0
                duration = time.monotonic() - started
                (tmp_path / "traces").rename(tmp_path / "whole")
                continue
            time.sleep(duration * moment / (MOMENTS + 1))
            if agent.poll() is not None:  # it has gone on to its end; the next moments are of another recording
                shutil.rmtree(tmp_path / "traces")
                continue
            ranks = sorted(_children(agent.pid))
            descendants = [child for process in ranks for child in _children(process)]
            if len(ranks) > rank:
                os.kill(ranks[rank], signal.SIGKILL)
            killed = time.monotonic()
            while any(map(_is_alive, [*ranks, *descendants])):
                assert time.monotonic() - killed < LONGEST_S, f"moment {moment}: a process is left"
                time.sleep(0.05)
            print(f"rank {rank}, moment {moment}: all ended after {time.monotonic() - killed:.1f} s")
    assert subprocess.run(launch, cwd=tmp_path, env=environment, check=False).returncode == 0
    assert any((tmp_path / "traces").iterdir())
