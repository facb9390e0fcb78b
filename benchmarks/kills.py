"""Kills a search at random moments while it screens subnets, then completes it, and counts records lost or computed twice.

Takes about 10 minutes.

    python benchmarks/kills.py [--draft digits/star] [--kills 20]
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import sqlalchemy

from autotune.study.document import LEDGER
from autotune.study.records import screened_in
from autotune.study.storage import storage_url

SCREENING_S = 9.0  # latest kill after screening has started


def finished(study: Path) -> dict[str, str]:
    """JSON of the finished records of subnets, by key."""
    if not (study / LEDGER).exists():
        return {}
    engine = sqlalchemy.create_engine(storage_url(study / LEDGER))
    query = "select key, record from autotune_ledger where stage = 'subnets' and record is not null"
    with engine.connect() as connection:
        return {key: record for key, record in connection.execute(sqlalchemy.text(query))}


def screened(records: dict[str, str]) -> int:
    """Number of subnets in records."""
    return sum(len(screened_in(json.loads(record))) for record in records.values())


def forests(study: Path) -> dict[Path, int]:
    """Modification time of each recorded forest."""
    return {path: path.stat().st_mtime_ns for path in study.glob("forests/**/*.safetensors")}


def differ(before: dict[Any, Any], after: dict[Any, Any]) -> int:
    """Number of entries that are lost or changed."""
    return sum(after.get(key) != value for key, value in before.items())


@click.command()
@click.option("--draft", default="digits/star", show_default=True)
@click.option("--space", default="full", show_default=True)
@click.option("--kills", default=20, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(draft: str, space: str, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as root:
        study, log = Path(root) / ".autotune" / "killed", Path(root) / "log"
        command = [sys.executable, "-m", "autotune", "search", "--draft", draft, "--space", space]
        command += ["--study", "killed", "--budget", "2m", "--trials", "50"]
        records: dict[str, str] = {}
        recorded: dict[Path, int] = {}
        lost = again = 0
        for number in range(1, kills + 1):
            with log.open("w") as stream:
                search = subprocess.Popen(command, cwd=root, stderr=stream, start_new_session=True)
            while "Cost table, ms" not in log.read_text() and search.poll() is None:
                time.sleep(0.1)
            time.sleep(rng.uniform(0.0, SCREENING_S))
            assert search.poll() is None, f"the search has ended before the kill:\n{log.read_text()}"
            kill = os.killpg if rng.random() < 0.5 else os.kill  # with its worker processes, or alone
            kill(search.pid, signal.SIGKILL)
            search.wait()
            time.sleep(1.0)  # worker processes notice that their parent is gone
            lost, again = lost + differ(records, finished(study)), again + differ(recorded, forests(study))
            records, recorded = finished(study), forests(study)
            print(f"kill {number}: {screened(records)} subnets screened, {len(recorded)} forests recorded", flush=True)
        subprocess.run(command, cwd=root, check=True, stderr=subprocess.DEVNULL)
        lost, again = lost + differ(records, finished(study)), again + differ(recorded, forests(study))
        print(
            f"{screened(finished(study))} subnets screened; {lost} records lost or changed, {again} forests lost or recorded again"
        )


if __name__ == "__main__":
    main()
