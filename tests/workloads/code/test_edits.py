"""Edits change what the instruction says, and nothing else: checked on the programs, not on their text."""

from __future__ import annotations

import ast
import textwrap

import numpy as np
import pytest

from autotune.workloads.code import edits

SOURCE = textwrap.dedent('''
    def scale(values, factor=2):
        """Multiply values."""
        if not values:
            return []
        scaled = [value * factor for value in values]
        return scaled
''').strip()
NAMES = ("canvas", "timeout")
RNGS = [np.random.default_rng(seed) for seed in range(20)]


def function(source: str = SOURCE) -> ast.FunctionDef:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    return node


def run(source: str, *args: object) -> object:
    """The result of the function, and what it logs."""
    logged: list[str] = []

    class Logger:
        debug = info = warning = staticmethod(logged.append)

    scope: dict[str, object] = {"logger": Logger}
    exec(source, scope)
    result = scope["scale"](*args)  # type: ignore[operator]
    return result, logged


def test_renaming_keeps_the_meaning() -> None:
    for rng in RNGS:
        instruction, source = edits.rename(SOURCE, function(), NAMES, rng) or ("", "")
        old, new = instruction.split("`")[1::2]
        assert new in NAMES and run(source, [1, 2]) == ([2, 4], [])
        names = {node.id for node in ast.walk(function(source)) if isinstance(node, ast.Name)}
        assert new in names and old not in names


def test_names_that_are_also_text_or_attributes_are_not_renamed() -> None:
    source = 'def f(item, log):\n    """Show the item."""\n    return log.item(item, item=item) + log'
    for rng in RNGS:
        found = edits.rename(source, function(source), ("fresh",), rng)
        assert found is not None and "`log`" in found[0], "only log is certain"
    assert edits.rename(source, function(source), ("item",), RNGS[0]) is None, "the new name is taken"


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("def f():", "def f({}):"),
        ("def f(a, b=(1, 2)):", "def f(a, b=(1, 2), {}):"),
        ("def f(a: int = 3) -> int:", "def f(a: int = 3, {}) -> int:"),
        ("def f(\n    a,\n    b,\n):", "def f(\n    a,\n    b, {},\n):"),
    ],
)
def test_a_parameter_is_added_behind_the_others(signature: str, expected: str) -> None:
    source = f"{signature}\n    return 1"
    for rng in RNGS[:5]:
        instruction, edited = edits.add_parameter(source, function(source), NAMES, rng) or ("", "")
        name = next(name for name in NAMES if f"`{name}" in instruction)
        default = function(edited).args.defaults[-1]
        assert edited == f"{expected.format(f'{name}={ast.unparse(default)}')}\n    return 1".replace("''", '""')
        assert function(edited).args.args[-1].arg == name


def test_functions_with_star_parameters_get_no_parameter() -> None:
    for source in ("def f(*a):\n    return 1", "def f(**a):\n    return 1", "def f(*, a):\n    return 1"):
        assert edits.add_parameter(source, function(source), NAMES, RNGS[0]) is None


def test_logging_is_inserted_where_the_instruction_says() -> None:
    places = set()
    for rng in RNGS:
        instruction, source = edits.insert_logging(SOURCE, function(), NAMES, rng) or ("", "")
        places.add(instruction.split("` ", 1)[1])
        assert ast.get_docstring(function(source)) == "Multiply values."
        for values, result in (([1], [2]), ([], [])):
            assert run(source, values)[0] == result and len(run(source, values)[1]) == 1
    assert places == {"at the beginning of the body.", "before every `return`."}


def test_an_edit_is_a_function_of_its_seed() -> None:
    once, again = ([edits.edit_function(SOURCE, NAMES, np.random.default_rng(s)) for s in range(12)] for _ in range(2))
    assert once == again and len({edit[0] for edit in once if edit}) > 4
    assert edits.edit_function("x = 1", NAMES, RNGS[0]) is None
