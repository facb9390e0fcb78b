"""Commands that are killed at random moments, and given again until they end: nothing is lost, changed or left
in part.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from xml.etree import ElementTree

import psutil

from autotune.documents.decoding_profile import DecodingProfile
from autotune.modeling.loading import reference
from autotune.study.storage import LEDGER
from tests.cli.processes import run_command, start_command
from tests.cli.test_end_to_end import write_small_job
from tests.sample_documents import decoding_profile
from tests.serve.servers import begin, send, url_of, wait_for
from tests.tiny_models import Pair
from tests.training.conftest import write_examples, write_recipe

ASKED = {"prompt": "USER: Count to ten. ASSISTANT:", "max_tokens": 20, "temperature": 0.0}
OUTPUTS = {
    "search": ["profile.json"],
    "check": ["junit.xml"],
    "train": ["draft/model.safetensors", "draft/config.json"],
}


def small_commands(pair: Pair, folder: Path) -> dict[str, tuple[object, ...]]:
    """Commands of a tiny pair with small work, by verb; their files are written to ``folder``."""
    models = ["--target", pair.target_folder, "--draft", pair.draft_folder]
    workload = write_small_job(folder)
    target, draft = (reference(str(one)) for one in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft).save(folder / "tree.json")
    write_examples(folder / "examples.jsonl")
    write_recipe(folder / "recipe.yaml", str(pair.target_folder))
    small = ["--space", "small.yaml", "--trials", "8", "--budget", "40s"]  # a bound that busy machines keep too
    return {
        "search": ("search", *models, *workload, *small, "-o", "profile.json"),
        "check": ("check", "tree.json", *workload, "--junit", "junit.xml"),
        "train": ("train", "recipe.yaml", "-o", "draft"),
        "run": ("run", "tree.json", *workload),
        "serve": ("serve", "tree.json", "--port", "0", "--json"),
    }


def remove(folder: Path, *names: str) -> None:
    for path in (folder / name for name in names):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def kept(folder: Path) -> dict[str, str]:
    """Finished records of ledgers, which are whole, and hashes of recorded forests and answers: no later run may lose
    or change one.
    """
    files = (
        path for pattern in ("forests/**/*.safetensors", "training-answers/*.json") for path in folder.rglob(pattern)
    )
    found = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    for path in folder.rglob(LEDGER):
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
            if database.execute("select 1 from sqlite_master where name = 'autotune_ledger'").fetchone():
                found |= dict(database.execute("select key, record from autotune_ledger where record is not null"))
    return found


def assert_whole(folder: Path) -> None:
    """No temporary file is left, and every document can be read."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".tmp", ".new") or path.name.startswith(".tmp")]
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())


def result(verb: str, folder: Path) -> object:
    """The part of a command's result that is not a time."""
    if verb == "search":
        return DecodingProfile.load(folder / "profile.json").point
    if verb == "check":
        cases = ElementTree.parse(folder / "junit.xml").iter("testcase")
        return [(case.get("classname"), case.get("name"), [part.tag for part in case]) for case in cases]
    return hashlib.sha256((folder / "draft/model.safetensors").read_bytes()).hexdigest()


def workers_of(process: BaseProcess) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def kill(verb: str, command: tuple[object, ...], folder: Path, times: int) -> str:
    """Kill a command, alone or with its worker processes, as often as said, then let it end; returns what was counted.

    Now and then it begins anew. What was finished before a kill is there after it, and two runs that end have one
    result.
    """
    order, num_killed, num_begun, before = random.Random(verb), 0, 0, dict[str, str]()
    begin_s = time.monotonic()
    done = run_command(*command, folder=folder)  # how long it takes
    assert done.returncode == 0, done.stderr
    whole_s, expected = time.monotonic() - begin_s, result(verb, folder)
    while num_killed < times:
        remove(folder, *OUTPUTS[verb])
        if order.random() < 0.4:
            remove(folder, ".autotune", "draft")
            before, num_begun = {}, num_begun + 1
        process = start_command(*command, folder=folder)
        process.join(order.uniform(0, whole_s))
        workers = workers_of(process)
        for worker in workers if order.random() < 0.5 else []:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        process.kill()
        process.join()
        assert process.exitcode in (0, -9)
        wait_for(lambda workers=workers: all(map(has_ended, workers)))  # with their parent
        num_killed += process.exitcode == -9
        whole_s *= 1.0 if process.exitcode == -9 else 0.9  # what the runs before have left makes it shorter
        after = kept(folder)
        assert before.items() <= after.items(), "a finished record was lost or changed"
        before = after
    results = []
    for _ in range(2):
        done = run_command(*command, folder=folder)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert all((folder / name).stat().st_size for name in OUTPUTS[verb])
        results.append(result(verb, folder))
    assert before.items() <= kept(folder).items() and results[0] == results[1]
    if verb != "search":  # whose winner is measured anew with each new study
        assert results[0] == expected
    assert_whole(folder)
    return f"{verb}: {num_killed} kills, {num_begun} times begun anew; {len(before)} records kept; the same result"


def kill_servers(command: tuple[object, ...], folder: Path, times: int) -> str:
    """Kill servers while they load and while they decode, and start the next one at the same port; all answer alike."""
    order, answers, port = random.Random(0), list[str](), "0"
    for turn in range(times):
        (folder / "log.out").unlink(missing_ok=True)
        process = start_command(*command, "--port", port, folder=folder, log=folder / "log")
        if turn % 4 == 3:
            process.join(order.uniform(0, 2))
        else:
            url = url_of(process, folder / "log")
            port = url.rpartition(":")[2]
            content = send(url, "/v1/completions", ASKED)[1]
            answers.append(content["choices"][0]["text"])
            client = begin(url, "/v1/completions", {**ASKED, "max_tokens": 1000, "stream": True})
            time.sleep(order.uniform(0, 0.3))
            client.close()
        process.kill()
        process.join()
        assert process.exitcode == -9
    assert len(set(answers)) == 1
    assert_whole(folder)
    return f"serve: {times} kills; {len(answers)} equal answers"
