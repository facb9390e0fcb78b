"""Tables are read on a terminal of 80 columns, names are shown as they are, and progress says how long it takes."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from autotune import console as console_module
from autotune.console import COLUMNS, Console, bands
from autotune.table import Table
from tests.tables import WIDTHS, check_table, printed

NAMES = ["plain", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "finalist 12"]
FIGURES = {"predicted": "1.57x (1.46-1.68)", "tokens/s": "1234", "leave-one-out error": "100.0 %", "same output": "9/9"}


@pytest.mark.parametrize("num_columns", [1, 2, 5, 13, 30])
@pytest.mark.parametrize("width", WIDTHS)
def test_names_and_figures_of_a_table_are_never_broken(num_columns: int, width: int) -> None:
    figures = ([*FIGURES.items()] * num_columns)[:num_columns]
    columns = ["arm", *(name for name, _ in figures)]
    check_table(Table("A table", columns, [[name, *(cell for _, cell in figures)] for name in NAMES]), width)


def test_a_table_that_fits_has_its_headers_in_one_line() -> None:
    assert bands(["arm", "same output"], [["ar", "9/9"]], 80) == [{0: 3, 1: 11}]
    assert bands(["arm", "same output"], [["ar", "9/9"]], 15) == [{0: 3, 1: 6}]
    assert bands(["arm", "same output", "tokens/s"], [["ar", "9/9", "7"]], 20) == [{0: 3, 1: 6}, {0: 3, 2: 8}]


def test_a_name_that_is_wider_than_the_terminal_is_folded_beside_its_figures() -> None:
    text = printed(Table("A table", ["arm", "M"], [["n" * 200, "2.35"]]), COLUMNS)
    assert (
        text.count("n") == 200 and "2.35" in text and max(len(line.rstrip()) for line in text.splitlines()) <= COLUMNS
    )


def on_terminal(code: str, columns: int) -> str:
    """Standard error of a program on a terminal of this width."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stderr=child, env=environment, check=True)
    os.close(child)
    text = b""
    try:
        while more := os.read(parent, 1 << 16):
            text += more
    except OSError:  # the terminal is closed
        pass
    os.close(parent)
    return text.decode()


PROGRAM = """
from autotune.console import Console
from autotune.table import Table
console = Console()
columns = ["arm", "measured", "same output"]
console.show(Table("A table", columns, [["finalist 12", "1.57x (1.46-1.68)", "16/16"]]))
with console.stage("replay", 4) as update:
    for number in range(4):
        update(number + 1, 4, "note")
"""


def test_a_narrow_terminal_gets_lines_in_place_of_bars() -> None:
    text = on_terminal(PROGRAM, 20)
    assert "1.57x (1.46-1.68)" in text and "replay: 2/4 note" in text


@pytest.mark.parametrize(("stage", "shown"), [('"replay", 4', "0/4"), ('"replay"', "4/4")])
def test_a_bar_has_its_total_when_it_is_known(stage: str, shown: str) -> None:
    text = on_terminal(PROGRAM.replace('"replay", 4', stage), 80)
    assert shown in text and "0:00 left note" in text and "/?" not in text


def test_the_time_left_leaves_out_what_was_done_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 0.0, 1.0, 1.0, 601.0, 601.0, 602.0])
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(clock))
    with Console().stage("traces") as update:
        update(6, 10)  # found on disk
        update(8, 10)
    assert "traces: 8/10 (10 min left)" in capsys.readouterr().err


def test_details_are_printed_by_a_verbose_command_alone(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("Arms", ["arm", "M", "share"], [["ar", "1.00", "1 %"]], details=["share"], labels={"M": "mean"})
    for verbose in (False, True):
        Console(verbose).detail("leave-one-out error 3 %")
        Console(verbose).show(table)
        shown = capsys.readouterr().err
        assert "M: mean\n" in shown and ("leave-one-out" in shown) == ("share" in shown) == verbose


def test_an_answer_is_on_standard_output_and_a_paragraph_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Console().answer(["chosen: eagle3", "next: autotune run http://u:SECRET@host/profile.json"])
    Console().say("word " * 60)
    captured = capsys.readouterr()
    assert captured.out == "\nchosen: eagle3\nnext: autotune run http://u:***@host/profile.json\n"
    assert captured.err.count("\n") == 1


def test_names_in_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    rows = [["[/x]", "[b]1"], ["draft[v1]", ":smile:"]]
    console.show(Table("Drafts [/x]", ["[bold]task", "[red]share"], rows, emphasised=1))
    console.say("draft[v1] [/x]")
    with console.stage("stage [/x]") as update:
        update(1, 1, "[/y]")
    console.say("http://u:SECRET@host/v1 answers")
    console.show(Table("x", ["url"], [["http://u:SECRET@host"]]))
    said = capsys.readouterr().err
    assert "SECRET" not in said and said.count("http://u:***@host") == 2
    for name in ("Drafts [/x]", "[bold]task", "[red]share", "[/x]", "[b]1", "draft[v1] ", ":smile:", "stage [/x]"):
        assert name in said
