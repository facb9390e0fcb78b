"""Searches again and again beside other processes, each in a folder of its own, and tells how far each prediction of
the winner lies from its measurement.

Conditions: ``quiet``; ``busy``, beside a process that burns a core in every second second; ``burning``, beside one that
always does; and ``bursts``, beside three processes that burn for three seconds out of every ten while the cost table is
measured. Prints for every search how long it took, the speedup that was predicted and the one that held-out prompts
measured, how many of them, and what tuning gained over the best published default; then medians by condition. A
default search takes five minutes.

    python benchmarks/default_searches.py quiet quiet busy busy bursts [--results FILE.jsonl] [-- --budget 2m]
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pandas as pd

from autotune.documents.decoding_profile import AR, DecodingProfile

BURN = """
import time
on_s, period_s, lasts_s = {}
started = time.monotonic()
while time.monotonic() - started < lasts_s:
    if (time.monotonic() - started) % period_s < on_s:
        sum(range(1000))
    else:
        time.sleep(0.005)
"""
ENDLESS_S = 1e6
TABLE_S = 75.0  # until the cost table of a default search is measured, with the loading of the models
CONDITIONS: dict[str, list[tuple[float, float, float]]] = {
    "quiet": [],
    "busy": [(1.0, 2.0, ENDLESS_S)],
    "burning": [(1.0, 1.0, ENDLESS_S)],
    "bursts": [(3.0, 10.0, TABLE_S)] * 3,
}
"""For each process: seconds in which it burns a core, period, and seconds until it ends."""


@contextlib.contextmanager
def other_processes(condition: str) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BURN.format(times)]) for times in CONDITIONS[condition]]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def searched(condition: str, arguments: tuple[str, ...], log: Path | None) -> dict[str, object]:
    """One search, and the figures of its profile."""
    with tempfile.TemporaryDirectory() as folder, other_processes(condition):
        command = [sys.executable, "-m", "autotune", "search", "-o", "profile.json", *arguments]
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        seconds = time.monotonic() - began
        if log is not None:
            with log.open("a") as file:
                file.write(done.stdout)
        if done.returncode != 0:
            raise click.ClickException(f"the search ended with {done.returncode}:\n{done.stdout[-2000:]}")
        profile = DecodingProfile.load(Path(folder) / "profile.json")
    loading = re.search(r"models loaded in (\d+) s", done.stdout)
    finalists = re.search(r"Finalists and published defaults.*?\n\n(.*?)\n\n", done.stdout, re.DOTALL)
    arms = [] if finalists is None else re.findall(r"^(\w[\w -]*):", finalists[1], re.MULTILINE)
    evidence, point = profile.evidence, profile.point
    over_default = [g for g in evidence.gains if g.task == "all" and g.over == evidence.best_default]
    over_plain = [g for g in evidence.gains if g.task == "all" and g.over == AR]
    predicted = point.predicted.speedup if point.predicted else float("nan")
    measured = point.measured.speedup if point.measured else float("nan")
    return {
        "condition": condition,
        "arguments": " ".join(arguments),
        "seconds": seconds,
        "of budget": seconds - float(loading[1] if loading else 0),
        "finalists": sum(arm.startswith("finalist ") for arm in arms),
        "defaults": sum(not arm.startswith("finalist ") for arm in arms),
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1,
        "tuned": over_plain[0].speedup if over_plain else float("nan"),
        "low": over_plain[0].ci95[0] if over_plain else float("nan"),
        "high": over_plain[0].ci95[1] if over_plain else float("nan"),
        "over default": over_default[0].speedup if over_default else float("nan"),
        "prompts": over_plain[0].num_prompts if over_plain else 0,
    }


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("conditions", nargs=-1, required=True)
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to which every search adds a line, beside a .log with their output.",
)
def main(conditions: tuple[str, ...], results: Path | None) -> None:
    chosen = [condition for condition in conditions if condition in CONDITIONS]
    arguments = tuple(argument for argument in conditions if argument not in CONDITIONS)
    rows = []
    for condition in chosen:
        rows.append(searched(condition, arguments, results and results.with_suffix(".log")))
        click.echo(json.dumps(rows[-1]))
        if results is not None:
            with results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    frame = pd.DataFrame(rows)
    frame["absolute error"] = frame.error.abs()
    click.echo(frame.drop(columns="arguments").round(3).to_string(index=False))
    columns = ["predicted", "measured", "absolute error", "tuned", "over default", "prompts", "of budget"]
    medians = frame.groupby("condition", sort=False)[columns].agg(lambda values: float(np.median(values)))
    click.echo(medians.round(3).to_string())


if __name__ == "__main__":
    main()
