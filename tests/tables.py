"""Reads printed tables back: the tables of all tests are printed at the widths of terminals, and nothing is broken."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from autotune.console import GAP, Console
from autotune.errors import masked
from autotune.table import Table

WIDTHS = (80, 100, 140)
show = Console.show


def printed(table: Table, width: int) -> str:
    """A table with its details as it is printed on a terminal of this width."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as stream:
        patch.setenv("COLUMNS", str(width))
        show(Console(verbose=True), table)
    return stream.getvalue()


def check_table(table: Table, width: int) -> None:
    """Read names and figures back: each row has its name, in each part of the table, and each figure whole."""
    lines = printed(table, width).splitlines()
    assert max(len(line.rstrip()) for line in lines[2:]) <= width, lines
    for column in table.columns:
        assert all(any(word in line for line in lines) for word in column.split()), (column, lines)
    words = [word for column in table.columns for word in column.split()]
    figures = max(map(len, [*words, *(cell for _, *cells in table.rows for cell in cells)]), default=0)
    for name, *cells in table.rows:
        if len(name) > width - figures - 2 * GAP:  # it is folded beside its figures
            continue
        parts = [line for line in lines if line.startswith(masked(name))]
        assert parts, (name, lines)
        assert all(any(masked(cell) in line for line in parts) for cell in cells), (name, cells, lines)


def checked_table(console: Console, table: Table) -> None:
    """Print a table, and read it back at each width."""
    for width in WIDTHS:
        check_table(table, width)
    show(console, table)
