"""Progress and tables for people, on standard error: standard output is for the answer of a command, and for JSON."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import JustifyMethod
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table as Grid
from rich.text import Text

from autotune.errors import masked
from autotune.table import Table
from autotune.table import percent as percent

QUIET_S = 600  # longest time without a line where standard error is not a terminal
COLUMNS = 80  # tables and answers are made for this width; a wider terminal shows more columns side by side
GAP = 2  # between columns


class Update(Protocol):
    """Shows the progress of a stage of work."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


_Show = Callable[[int, int, str, float | None], None]
"""Shows the units that are done, all units, a note, and the seconds that are left if they are known."""


class _StandardError(RichConsole):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1, which is a regression


class Console:
    """Prints to standard error: progress bars on a terminal, plain lines elsewhere.

    Args:
        verbose: print details as well.
    """

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self._rich = _StandardError(stderr=True, highlight=False)
        self._has_bars = sys.stderr.isatty() and self._rich.width >= COLUMNS
        self._rich.width = max(COLUMNS, self._rich.width)

    def say(self, text: str) -> None:
        """Print a paragraph, which is one line where standard error is not a terminal."""
        self._rich.print(masked(text), markup=False, soft_wrap=not sys.stderr.isatty())

    def detail(self, text: str) -> None:
        """Print a paragraph that only a verbose command prints."""
        if self.verbose:
            self.say(text)

    def answer(self, lines: Sequence[str]) -> None:
        """Print the last lines of a command, on standard output."""
        sys.stderr.flush()
        print("", *map(masked, lines), sep="\n", flush=True)

    def show(self, table: Table) -> None:
        """Print a table, and what its names stand for. Figures are never broken: headers are, and columns that do not
        fit beside the first one follow below it.
        """
        shown = [n for n, column in enumerate(table.columns) if self.verbose or column not in table.details]
        columns = [table.columns[n] for n in shown]
        cells = [[masked(row[n]) for n in shown] for row in table.rows]
        self._rich.print()
        self._rich.print(table.title, style="bold", markup=False)
        for widths in bands(columns, cells, self._rich.width):
            grid = Grid(header_style="dim", box=None, pad_edge=False, padding=(0, GAP, 0, 0))
            for number, width in widths.items():
                justify: JustifyMethod = "right" if number else "left"
                grid.add_column(Text(columns[number]), justify=justify, width=width, overflow="fold", vertical="bottom")
            for number, row in enumerate(cells):
                style = "bold" if number == table.emphasised else None
                grid.add_row(*(Text(row[n]) for n in widths), style=style)
            self._rich.print(grid)
        self._rich.print()
        for name, label in table.labels.items():
            text = f"{name}: {label}"
            self.say(textwrap.fill(text, self._rich.width, subsequent_indent="   ", break_on_hyphens=False))

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Update]:
        """Show the progress of a stage of work, and how long it took. Yields the function that reports progress.

        Args:
            total: units of work, if they are known before the first one is done.
        """
        started = time.monotonic()
        with self._bar(name, total) if self._has_bars else self._lines(name) as show:
            first: tuple[int, float] | None = None if total is None else (0, started)

            def update(done: int, total: int, note: str = "") -> None:
                nonlocal first
                now = time.monotonic()
                first = first or (done, now)  # work that was done before this run took no time
                seconds = (now - first[1]) / max(1, done - first[0]) * (total - done)
                show(done, total, note, seconds if done > first[0] else None)

            yield update
        self.say(f"{name}: done in {time.monotonic() - started:.1f} s")

    @contextmanager
    def _bar(self, name: str, total: int | None) -> Iterator[_Show]:
        """A bar, which disappears at the end."""
        columns = (
            TextColumn("{task.description:24}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[count]}", markup=False),
            TextColumn("{task.fields[left]} {task.fields[note]}", markup=False),
        )
        with Progress(*columns, console=self._rich, transient=True) as progress:
            bar = progress.add_task(name, total=total, count="" if total is None else f"0/{total}", note="", left="")

            def show(done: int, total: int, note: str, seconds: float | None) -> None:
                left = "" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02} left"
                progress.update(bar, completed=done, total=total, count=f"{done}/{total}", note=note, left=left)

            yield show

    @contextmanager
    def _lines(self, name: str) -> Iterator[_Show]:
        """A line for each quarter of the work."""
        quarters, printed_at = 0, time.monotonic()

        def show(done: int, total: int, note: str, seconds: float | None) -> None:
            nonlocal quarters, printed_at
            now = time.monotonic()
            if done < total and (4 * done // total > quarters or now - printed_at > QUIET_S):
                quarters, printed_at = 4 * done // total, now
                left = f" ({seconds / 60:.0f} min left)" if seconds is not None and seconds >= 60 else ""
                self.say(f"  {name}: {done}/{total}{left} {note}".rstrip())

        yield show


def bands(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[dict[int, int]]:
    """The widths of columns by their numbers, for each part of a table that fits into ``width``; the first column is in
    all of them. Headers are broken between words where the whole table does not fit otherwise.
    """
    cells = [max((cell_len(row[n]) for row in rows), default=0) for n in range(len(columns))]
    widths = [max(cell_len(column), cell) for column, cell in zip(columns, cells, strict=True)]
    if sum(widths) + GAP * len(widths) > width:
        words = [max(map(cell_len, column.split()), default=0) for column in columns]
        widths = [max(word, cell) for word, cell in zip(words, cells, strict=True)]
    first = min(widths[0], width - GAP - max(widths[1:], default=0) - GAP)
    parts = [{0: first}]
    for number, column in enumerate(widths[1:], start=1):
        if sum(parts[-1].values()) + GAP * (len(parts[-1]) + 1) + column > width:
            parts.append({0: first})
        parts[-1][number] = column
    return parts
