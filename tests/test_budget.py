"""The project stays small enough to be read. Size is the number of statements, which no formatting changes."""

from __future__ import annotations

import ast

import pytest

from tests.imports import MODULES, ROOT
from tests.test_layers import LAYERS

MOST_LAYERS = 12
MOST_LINES_OF_A_MODULE = 400
# Statements by room: a folder, or the modules beside the folders.
MOST_STATEMENTS = {
    "autotune": {
        "autotune": 460,
        "check": 873,
        "cli": 775,
        "cost": 532,
        "doctor": 385,
        "documents": 853,
        "drafters": 2492,
        "evaluation": 1003,
        "measuring": 735,
        "modeling": 2590,
        "recording": 429,
        "report": 721,
        "runtime": 1254,
        "search": 2725,
        "study": 356,
        "training": 801,
        "trees": 1231,
        "workloads": 788,
        "serve": 617,
        "machine": 276,
        "engines": 1505,
        "replay": 894,
    },
    "tests": {
        "tests": 3192,
        "check": 905,
        "cli": 739,
        "cost": 451,
        "doctor": 218,
        "documents": 369,
        "drafters": 1253,
        "drafts": 44,
        "evaluation": 863,
        "measuring": 565,
        "modeling": 2128,
        "recording": 485,
        "report": 815,
        "runtime": 2236,
        "search": 2603,
        "study": 316,
        "training": 1087,
        "trees": 1353,
        "workloads": 857,
        "hub": 783,
        "serve": 492,
        "machine": 326,
        "engines": 1164,
        "replay": 793,
    },
    "benchmarks": {"benchmarks": 3436, "evidence": 706, "gpu": 374},
}


def num_statements(source: str) -> int:
    """Statements of a module. Docstrings do not count, nor do other strings that stand alone."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(not _is_docstring(node) for node in statements)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def sizes(folder: str) -> dict[str, int]:
    """Statements of each room of a folder."""
    rooms: dict[str, int] = {}
    for path in (ROOT / folder).rglob("*.py"):
        parents = path.relative_to(ROOT / folder).parts[:-1]
        room = parents[0] if parents else folder
        rooms[room] = rooms.get(room, 0) + num_statements(path.read_text())
    return rooms


def test_a_statement_counts_once_however_it_is_written() -> None:
    assert num_statements('"""A docstring."""\nfirst, second = 1, 2\n') == 1
    assert num_statements("first = 1; second = 2\n") == num_statements("first = 1\nsecond = 2\n") == 2
    assert num_statements('if first:\n    """A string."""\n    second = (\n        2\n    )\n') == 2


@pytest.mark.parametrize("folder", MOST_STATEMENTS)
def test_every_room_keeps_to_its_statements(folder: str) -> None:
    found, most = sizes(folder), MOST_STATEMENTS[folder]
    assert found.keys() == most.keys(), "give a new room a number of statements, and drop those of a room that is gone"
    larger = {room: f"{number} of {most[room]}" for room, number in found.items() if number > most[room]}
    assert not larger, (
        f"{folder}/ has more statements than it may have: {larger}; delete what no measurement in benchmarks/ shows to "
        "be worth having, fold what became simpler, or say in the commit which ability the further statements pay for"
    )


def test_no_module_is_longer_than_one_can_read() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    long = {
        name: length
        for name, length in lengths.items()
        if name.partition(".")[0] == "autotune" and length > MOST_LINES_OF_A_MODULE
    }
    assert not long, (
        f"modules of more than {MOST_LINES_OF_A_MODULE} lines: {long}; find the name of one half, and move it to a "
        "module of that name"
    )


def test_imports_have_few_floors() -> None:
    assert len(LAYERS) <= MOST_LAYERS, (
        f"LAYERS has {len(LAYERS)} rows, and {MOST_LAYERS} are allowed: put the new module into the lowest row above "
        "what it imports, or turn the import that needs another row around"
    )
