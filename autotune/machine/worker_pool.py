"""Processes that share a stage's work, such as recording; work whose time is compared runs alone.

A stage's work consists of pieces that are stored on disk as they are made: records of the ledger, forests of a trace. A
worker gets its task once and is never told more; what a killed worker has not made, the main process makes.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

from autotune.console import Update

MIN_REMAINING_S = 25.0  # of work: a worker has to load torch and the models first, which takes 8 s of one core
MAX_WORKERS = 7  # more of them wait for memory


class WorkerPool:
    """Up to ``num_workers`` processes that run ``task(rank, *arguments)``, ranks from 1.

    They start once ``report`` finds enough work left before ``deadline``, of ``time.monotonic``, and are terminated at
    the end of the ``with`` block.
    """

    def __init__(
        self, num_workers: int, task: Callable[..., None], *arguments: Any, deadline: float = math.inf
    ) -> None:
        self.num_workers = num_workers
        self.deadline = deadline
        self.processes: list[Any] = []
        self._task, self._arguments = task, arguments
        self._first_report: tuple[int, float] | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()

    def reporting(self, update: Update, *, before: int = 0, after: int = 0) -> Callable[[int, int], None]:
        """Reports progress to a stage and to this pool, of whose pieces of work so many come before and after those of
        the stage.
        """

        def report(done: int, of: int) -> None:
            update(done, of)
            self.report(before + done, before + of + after)

        return report

    def report(self, done: int, of: int) -> None:
        """Report progress in pieces of work; starts the workers when the rest would take ``MIN_REMAINING_S``."""
        now = time.monotonic()
        self._first_report = self._first_report or (done, now)  # pieces found on disk say nothing about the speed
        first, began = self._first_report
        if self.processes or done <= first:
            return
        if min((now - began) / (done - first) * (of - done), self.deadline - now) < MIN_REMAINING_S:
            return
        context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
        work = pickle.dumps((self._task, self._arguments))
        for rank in range(1, self.num_workers + 1):
            process = context.Process(target=_run_task, args=(_logging_levels(), rank, work), daemon=True)
            process.start()
            self.processes.append(process)


def _logging_levels() -> dict[str, int]:
    """Levels of the loggers that have one."""
    loggers = logging.Logger.manager.loggerDict.items()
    return {name: logger.level for name, logger in loggers if isinstance(logger, logging.Logger) and logger.level}


def _run_task(levels: dict[str, int], rank: int, work: bytes) -> None:
    """Run a pickled task. Unpickling imports packages, which log as the parent's packages do."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    task, arguments = pickle.loads(work)
    task(rank, *arguments)


def _exit_with_parent() -> None:
    """End this process when its parent is killed: a search that is started again must not compete with old workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
