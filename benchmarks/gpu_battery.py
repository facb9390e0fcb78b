"""Measures this runtime on a GPU in stages: the card, tests, single kernels, rounds, compilers, cost tables, searches.

    python benchmarks/gpu_battery.py --output results [--stages rounds,kernels] [--switch base,captured] [--limit 1200]

Every stage is a process with its own time limit. It writes its JSON to the output folder as it goes; its output goes to
a log of the same name, and cost tables and profiles to ``documents``. A stage that fails or is late does not stop the
next. Models have the sizes of Llama-3.1-8B and Qwen2.5-VL-7B and random weights, because latency does not depend on
weights. Everything takes about 20 minutes on an H100, and with ``--dry``, on tiny models and a rehearsed
device, 3 minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import click

ROOT = Path(__file__).parents[1]
START = "import sys, autotune; sys.path.insert(0, {root!r}); from benchmarks.gpu.stage import main; main()"
"""A stage's process: the package is that of ``PYTHONPATH``, everything else is this project's."""
ERROR = '"error": "'  # of a part of a stage
LEAST_S = 5.0  # for a stage to be started


class Stage(NamedTuple):
    """A stage of the battery."""

    function: str
    """As in ``benchmarks.gpu.stage.Job``."""
    seconds: float
    """Its time limit."""
    is_switched: bool = False
    """Whether it is run for every ``--switch``."""


STAGES = {
    "env": Stage("micro.env", 20),
    "tests": Stage("commands.pytest", 90),
    "micro": Stage("micro.operations", 60),
    "rounds": Stage("rounds.short", 250, is_switched=True),
    "flags": Stage("rounds.flags", 110),
    "kernels": Stage("rounds.kernels", 60, is_switched=True),
    "long": Stage("rounds.long", 150, is_switched=True),
    "cost": Stage("commands.measure", 200),
    "search-smollm2": Stage("commands.search_smollm2", 170),
    "search-8b": Stage("commands.search_8b", 130),
}
SWITCHES = "base,captured,masks,compiled,float8,eager"


def chosen(given: str, known: Collection[str]) -> list[str]:
    """Names with commas between them."""
    names = given.split(",")
    if unknown := set(names) - set(known):
        raise click.UsageError(f"choose of {', '.join(known)}; got {', '.join(sorted(unknown))}")
    return names


def run(
    stage: Stage, file: Path, switches: list[str], seconds: float, work: Path, *, package: Path | None, dry: bool
) -> str:
    """Run a stage in a process of its own, which ends when its time is over; returns how it ended.

    Args:
        package: folder of another version of the package to measure.
    """
    job = {"function": stage.function, "file": str(file), "switches": switches, "dry": dry}
    command = [sys.executable, "-c", START.format(root=f"{ROOT}"), json.dumps(job)]
    environment = {**os.environ, "PYTHONPATH": str(package or ROOT)}
    with file.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, cwd=work, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"late, ended after its {seconds:.0f} s"
    lines = [f"exit code {code}", *file.with_suffix(".log").read_text().strip().splitlines()]
    errors = file.read_text().count(ERROR) if file.exists() else 0
    how = "done" if code == 0 else f"failed ({lines[-1][:150]})"
    return f"{how}, {errors} errors in {file.name}" if errors else how


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for what is measured.")
@click.option("--limit", default=1800.0, show_default=True, help="Seconds for everything.")
@click.option("--stages", default=",".join(STAGES), show_default=True)
@click.option("--switch", default="captured,masks,compiled,float8", show_default=True, help=f"Some of {SWITCHES}.")
@click.option("--base", type=click.Path(path_type=Path, exists=True), help="Folder whose package is the switch base.")
@click.option("--dry", is_flag=True, help="Tiny models on a rehearsed device: times mean nothing.")
def main(output: Path, limit: float, stages: str, switch: str, base: Path | None, dry: bool) -> None:
    """Measure this runtime on a GPU; prints a line for each stage, and exits with 1 if one fails."""
    switches = chosen(switch, SWITCHES.split(","))
    if ("base" in switches) != (base is not None):
        raise click.UsageError("the switch base compares with the package of another folder; give it and --base FOLDER")
    end, ends = time.monotonic() + limit, set()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for name in chosen(stages, STAGES):
            stage, others = STAGES[name], [one for one in switches if one != "base"]
            runs = [(name, others, None)] if others or not stage.is_switched else []
            if stage.is_switched and base is not None:
                runs.insert(0, (f"{name}-base", ["base"], base.absolute()))
            for label, arms, package in runs:
                started = time.monotonic()
                seconds, how = min(stage.seconds, end - started), "skipped, no time is left"
                if seconds > LEAST_S:
                    file = output.absolute() / f"{label}.json"
                    how = run(stage, file, arms, seconds, Path(work), package=package, dry=dry)
                ends.add(how.partition(",")[0])
                click.echo(f"{label}: {how}, {time.monotonic() - started:.0f} s")
    sys.exit(ends != {"done"})


if __name__ == "__main__":
    main()
