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
        "autotune": 471,
        "check": 809,
        "cli": 781,
        "cost": 558,
        "doctor": 256,
        "documents": 935,
        "drafters": 2268,
        "evaluation": 975,
        "measuring": 783,
        "modeling": 2818,
        "recording": 549,
        "report": 426,
        "runtime": 1320,
        "search": 1807,
        "study": 527,
        "training": 704,
        "trees": 1214,
        "workloads": 724,
        "serve": 598,
        "machine": 323,
        "engines": 1671,
        "replay": 883,
    },
    "tests": {
        "tests": 2830,
        "check": 986,
        "cli": 710,
        "cost": 430,
        "doctor": 155,
        "documents": 472,
        "drafters": 1078,
        "drafts": 44,
        "evaluation": 739,
        "measuring": 486,
        "modeling": 1761,
        "recording": 511,
        "report": 692,
        "runtime": 2054,
        "search": 1882,
        "study": 451,
        "training": 928,
        "trees": 1167,
        "workloads": 735,
        "hub": 936,
        "serve": 486,
        "machine": 379,
        "engines": 1659,
        "replay": 726,
        "sharded": 353,
    },
    "benchmarks": {"benchmarks": 2337, "evidence": 737, "gpu": 376},
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
