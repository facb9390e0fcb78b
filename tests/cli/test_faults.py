"""Commands that are killed, and disks that are full, at many moments: nothing partial, and the same command completes."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.documents.decoding_profile import DecodingProfile
from autotune.modeling.loading import reference
from tests.api.servers import begin, send, url_of
from tests.cli.processes import Done, run_command, start_command
from tests.cli.test_end_to_end import write_small_job
from tests.sample_documents import decoding_profile
from tests.tiny_models import Pair
from tests.training.conftest import write_examples, write_recipe

pytestmark = [pytest.mark.nightly, pytest.mark.long]
ASKED = {"prompt": "USER: Count to ten. ASSISTANT:", "max_tokens": 20, "temperature": 0.0}


def size_of(folder: Path) -> int:
    """Bytes of all files: it grows with the work."""
    return sum(
        path.stat().st_size
        for path in list(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".out", ".err")
    )


def assert_whole(folder: Path) -> None:
    """No temporary file is left, and every document can be read."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix == ".tmp"]
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())


def remove(folder: Path, *names: str) -> None:
    for path in (folder / name for name in names):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.fixture
def commands(pair: Pair, tmp_path: Path) -> dict[str, tuple[object, ...]]:
    """Search, check and train of the tiny pair, with small work."""
    models = ["--target", pair.target_folder, "--draft", pair.draft_folder]
    workload = write_small_job(tmp_path)
    target, draft = (reference(str(folder)) for folder in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft).save(tmp_path / "tree.json")
    write_examples(tmp_path / "examples.jsonl")
    write_recipe(tmp_path / "recipe.yaml", str(pair.target_folder))
    small = ["--space", "small.yaml", "--trials", "8", "--budget", "40s"]  # a bound that busy machines keep too
    return {
        "search": ("search", *models, *workload, *small, "-o", "profile.json"),
        "check": ("check", "tree.json", *workload, "--junit", "junit.xml", "--markdown", "check.md"),
        "train": ("train", "recipe.yaml", "-o", "draft"),
    }


OUTPUTS = {
    "search": ["profile.json"],
    "check": ["junit.xml", "check.md"],
    "train": ["draft/model.safetensors", "draft/config.json"],
}


@pytest.mark.parametrize(("verb", "times"), [("search", 14), ("check", 8), ("train", 8)])
def test_killed_commands_leave_nothing_partial_and_complete(
    commands: dict[str, tuple[object, ...]], verb: str, times: int, tmp_path: Path
) -> None:
    command, order, was_killed = commands[verb], random.Random(verb), 0
    begin_s = time.monotonic()
    done = run_command(*command, folder=tmp_path)  # how long it takes
    assert done.returncode == 0, done.stderr
    whole_s = time.monotonic() - begin_s
    while was_killed < times:
        begun = (name for name in (".autotune", "draft") if order.random() < 0.3)
        remove(tmp_path, *OUTPUTS[verb], *begun)  # it begins anew, or where the one before was killed
        process = start_command(*command, folder=tmp_path)
        process.join(order.uniform(0, whole_s))
        process.kill()
        process.join()
        was_killed += process.exitcode == -9
        whole_s *= 1.0 if process.exitcode == -9 else 0.9  # what the runs before have left makes it shorter
    print(f"{verb}: killed {was_killed} times")
    done = run_command(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / name).stat().st_size for name in OUTPUTS[verb])
    assert_whole(tmp_path)
    if verb == "search":
        DecodingProfile.load(tmp_path / "profile.json")


def test_killed_servers_can_be_started_again(commands: dict[str, tuple[object, ...]], tmp_path: Path) -> None:
    """While they load, and while they decode; at the same port."""
    order, answers, port = random.Random(0), set(), "0"
    for turn in range(10):
        (tmp_path / "log.out").unlink(missing_ok=True)
        process = start_command("serve", "tree.json", "--port", port, "--json", folder=tmp_path, log=tmp_path / "log")
        if turn in (3, 7):
            process.join(order.uniform(0, 2))
        else:
            url = url_of(process, tmp_path / "log")
            port = url.rpartition(":")[2]
            content = send(url, "/v1/completions", ASKED)[1]
            answers.add(content["choices"][0]["text"])
            client = begin(url, "/v1/completions", {**ASKED, "max_tokens": 1000, "stream": True})
            time.sleep(order.uniform(0, 0.3))
            client.close()
        process.kill()
        process.join()
    assert len(answers) == 1


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
