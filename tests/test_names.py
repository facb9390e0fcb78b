"""A name means one thing in the package."""

from __future__ import annotations

import ast
from collections import Counter

from tests.imports import MODULES

PACKAGE = {name: ast.parse(path.read_text()) for name, path in MODULES.items() if name.startswith("autotune")}
STEPS = {"grow", "prune", "reset", "update"}  # of every tree policy and of the fallback, which callers name by module


def test_class_names_are_unique() -> None:
    classes = Counter(
        node.name for tree in PACKAGE.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_public_functions_of_modules_have_unique_names() -> None:
    """A module of ``cli`` has one ``command``, and a module of ``trees`` the compiled steps of one policy."""
    functions = Counter(
        node.name
        for module, tree in PACKAGE.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if not (module.startswith("autotune.cli.") and node.name == "command")
        if not (module.startswith("autotune.trees.") and node.name in STEPS)
    )
    assert [name for name, count in functions.items() if count > 1] == []
