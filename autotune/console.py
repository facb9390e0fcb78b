"""What people see: progress and tables on standard error, so that standard output stays free for results and JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

QUIET_S = 600  # where nobody watches, a line at least so often
Update = Callable[[int, int, str], None]
"""Called as update(done, of, note)."""


class Console:
    """Prints to standard error: a moving bar where a person watches, plain lines elsewhere."""

    def __init__(self) -> None:
        self._rich = RichConsole(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 150)

    def say(self, text: str) -> None:
        """One line."""
        self._rich.print(text, markup=False)

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, emphasised: int | None = None
    ) -> None:
        """A table; the first column is text, the others are figures."""
        self._rich.print()
        self._rich.print(title, style="bold", markup=False)
        table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, column in enumerate(columns):
            if number == 0:
                table.add_column(column, overflow="fold")
            else:
                table.add_column(column, justify="right", no_wrap=True)
        for number, row in enumerate(rows):
            table.add_row(*row, style="bold" if number == emphasised else None)
        self._rich.print(table)
        self._rich.print()

    @contextmanager
    def stage(self, name: str) -> Iterator[Update]:
        """A piece of long work: yields what to call with its progress, and says how long it took."""
        started = time.monotonic()
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description:24}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            with Progress(*columns, console=self._rich, transient=True, speed_estimate_period=300) as progress:
                bar = progress.add_task(name, total=None, note="")

                def update(done: int, of: int, note: str = "") -> None:
                    progress.update(bar, completed=done, total=of, note=note)

                yield update
        else:
            said, said_at = 0, started  # quarters
            first: tuple[int, float] | None = None  # what was done before us, or at once

            def update(done: int, of: int, note: str = "") -> None:
                nonlocal said, said_at, first
                now = time.monotonic()
                first = first or (done, now)
                if done < of and (4 * done // of > said or now - said_at > QUIET_S):
                    said, said_at = 4 * done // of, now
                    seconds = (now - first[1]) / max(1, done - first[0]) * (of - done)
                    left = f" ({seconds / 60:.0f} min left)" if seconds >= 60 else ""
                    self.say(f"  {name}: {done}/{of}{left} {note}".rstrip())

            yield update
        self.say(f"{name}: done in {time.monotonic() - started:.1f} s")
