"""Processes that do a stage's work beside this one: recording takes a core, not time that is compared.

A stage's work is cut into pieces that whoever comes first makes, and leaves on disk: a record of the ledger, a forest. So
a helper is told what there is to do, and nothing after that; what a helper that dies has not made is made here.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

WORTH_S = 15.0  # of work left: a helper has to load torch and the models first
MOST_HELPERS = 7  # more wait for memory


class WorkerPool:
    """Up to ``number`` processes that run ``task(rank, *arguments)``, ranks from 1; started when ``report`` first tells
    that they are worth it, and ended with the block.
    """

    def __init__(self, number: int, task: Callable[..., None], *arguments: Any) -> None:
        self.number = number
        self.started: list[Any] = []
        self._task, self._arguments = task, arguments
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever a helper is at has been made by now, or is given up."""
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.join()

    def report(self, done: int, of: int) -> None:
        """So many pieces of work are done."""
        now = time.monotonic()
        self._first = self._first or (done, now)  # what was there before is no sign of speed
        first, began = self._first
        if self.started or done <= first or (now - began) / (done - first) * (of - done) < WORTH_S:
            return
        context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
        for rank in range(1, self.number + 1):
            process = context.Process(target=_help, args=(self._task, rank, self._arguments), daemon=True)
            process.start()
            self.started.append(process)


def _help(task: Callable[..., None], rank: int, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    task(rank, *arguments)


def _end_with_parent() -> None:
    """A search that was killed is begun anew: nobody should be working for the old one beside it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
