"""Commands in real processes, forked from a server that has imported the runtime once: importing it takes seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llava.modeling_llava",
    "transformers.models.auto.modeling_auto",
    "autotune.cli.main",
    "autotune.search.pipeline",
    "autotune.evaluation.bench_arms",
    "autotune.evaluation.answers",
    "autotune.check.job",
)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def start_command(
    *arguments: object, folder: Path, log: Path | None = None, prepare: Callable[[], None] | None = None
) -> BaseProcess:
    """Start ``autotune`` with these arguments in a folder, after ``prepare`` there; its standard output and error go to
    ``log``.out and ``log``.err.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(target=_command, args=([*map(str, arguments)], folder, log, prepare))
    process.start()
    return process


def search_briefly() -> None:
    """Bound what a search measures, so that it ends early in a budget that a busy machine keeps too."""
    from autotune.measuring.settings import CostSettings
    from autotune.search import thresholds

    CostSettings.time_limit_s = 3.0
    thresholds.MAX_PASSES = 1


def run_command(*arguments: object, folder: Path, prepare: Callable[[], None] | None = None) -> Done:
    """Run ``autotune`` with these arguments in a folder, to its end."""
    log = folder / ".command"
    process = start_command(*arguments, folder=folder, log=log, prepare=prepare)
    process.join()
    assert process.exitcode is not None
    texts = [log.with_suffix(suffix).read_text() for suffix in (".out", ".err")]
    return Done(process.exitcode, *texts)


def _command(arguments: list[str], folder: Path, log: Path | None, prepare: Callable[[], None] | None) -> None:
    os.chdir(folder)
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(os.devnull if log is None else log.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    from autotune.cli.main import main

    if prepare is not None:
        prepare()
    main(arguments)
