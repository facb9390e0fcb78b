"""Reads printed tables back: the tables of all tests are printed at the widths of terminals, and nothing is broken."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr

import pytest

from autotune.console import GAP, Console
from autotune.errors import masked

WIDTHS = (80, 100, 140)
print_table = Console.table


def printed(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """A table as it is printed on a terminal of this width."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as stream:
        patch.setenv("COLUMNS", str(width))
        print_table(Console(), title, columns, rows)
    return stream.getvalue()


def check_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Read names and figures back: each row has its name, in each part of the table, and each figure whole."""
    lines = printed(title, columns, rows, width).splitlines()
    assert max(len(line.rstrip()) for line in lines[2:]) <= width, lines
    for column in columns:
        assert all(any(word in line for line in lines) for word in column.split()), (column, lines)
    figures = max((len(cell) for _, *cells in rows for cell in cells), default=0)
    for name, *cells in rows:
        if len(name) > width - figures - 2 * GAP:  # it is folded beside its figures
            continue
        own = [line for line in lines if line.startswith(masked(name))]
        assert own, (name, lines)
        assert all(any(masked(cell) in line for line in own) for cell in cells), (name, cells, lines)


def checked_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    emphasised: int | None = None,
) -> None:
    """Print a table, and read it back at each width."""
    for width in WIDTHS:
        check_table(title, columns, rows, width)
    print_table(console, title, columns, rows, emphasised=emphasised)
