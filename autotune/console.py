"""Progress and tables for people, on standard error: standard output is for results and JSON."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from autotune.errors import masked

QUIET_S = 600  # longest time without a line where standard error is not a terminal


class Update(Protocol):
    """Shows the progress of a stage of work."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


def percent(value: float | None, digits: int = 1) -> str:
    """A share in per cent; a dash for None."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


class _StandardError(RichConsole):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1, which is a regression


class Console:
    """Prints to standard error: progress bars on a terminal, plain lines elsewhere."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self._rich = _StandardError(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 150)

    def say(self, text: str) -> None:
        self._rich.print(masked(text), markup=False)

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, emphasised: int | None = None
    ) -> None:
        """Print a table. The first column is text, the others are figures; ``emphasised`` is the index of a
        bold row.
        """
        self._rich.print()
        self._rich.print(title, style="bold", markup=False)
        table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, column in enumerate(columns):
            if number == 0:
                table.add_column(Text(column), overflow="fold")
            else:
                table.add_column(Text(column), justify="right", no_wrap=True)
        for number, row in enumerate(rows):
            table.add_row(*(Text(masked(cell)) for cell in row), style="bold" if number == emphasised else None)
        self._rich.print(table)
        self._rich.print()

    def labels(self, labels: Mapping[str, str]) -> None:
        """Print what names in a table stand for, in lines of at most 120 characters."""
        for name, label in labels.items():
            self.say(textwrap.fill(f"{name}: {label}", 120, subsequent_indent="   ", break_on_hyphens=False))

    @contextmanager
    def stage(self, name: str) -> Iterator[Update]:
        """Show the progress of a stage of work, and how long it took. Yields the function that reports progress."""
        started = time.monotonic()
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description:24}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
            )
            with Progress(*columns, console=self._rich, transient=True, speed_estimate_period=300) as progress:
                bar = progress.add_task(name, total=None, note="")

                def update(done: int, total: int, note: str = "") -> None:
                    progress.update(bar, completed=done, total=total, note=note)

                yield update
        else:
            quarters, printed_at = 0, started
            first: tuple[int, float] | None = None  # excludes cached work from the estimate of the time left

            def update(done: int, total: int, note: str = "") -> None:
                nonlocal quarters, printed_at, first
                now = time.monotonic()
                first = first or (done, now)
                if done < total and (4 * done // total > quarters or now - printed_at > QUIET_S):
                    quarters, printed_at = 4 * done // total, now
                    seconds = (now - first[1]) / max(1, done - first[0]) * (total - done)
                    left = f" ({seconds / 60:.0f} min left)" if seconds >= 60 else ""
                    self.say(f"  {name}: {done}/{total}{left} {note}".rstrip())

            yield update
        self.say(f"{name}: done in {time.monotonic() - started:.1f} s")
