"""A name means one thing in the package, and a docstring is a phrase that a reader knows."""

import ast
import re
from collections import Counter
from collections.abc import Iterable

from tests.imports import MODULES

TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
PACKAGE = {name: tree for name, tree in TREES.items() if name.startswith("autotune")}
STEPS = {"grow", "prune", "reset", "update"}  # of a tree policy: other modules call them by the module's name


def repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def test_class_names_are_unique() -> None:
    nodes = (node for tree in PACKAGE.values() for node in ast.walk(tree))
    assert repeated(node.name for node in nodes if isinstance(node, ast.ClassDef)) == []


def test_public_functions_of_modules_have_unique_names() -> None:
    """Except the ``command`` of each module of ``cli`` and the compiled steps of each module of ``trees``."""
    functions = [(name, n.name) for name, tree in PACKAGE.items() for n in tree.body if isinstance(n, ast.FunctionDef)]
    allowed = {"autotune.cli": {"command"}, "autotune.trees": STEPS}
    counted = [name for module, name in functions if name not in allowed.get(module.rpartition(".")[0], ())]
    assert repeated(name for name in counted if not name.startswith("_")) == []


def test_summaries_are_phrases_that_a_reader_knows() -> None:
    """No docstring begins with the relative clauses that an earlier version was written in."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(text := getattr(node.value, "value", None), str):
                assert not re.match(r"(Of|What|That|Those|Who|Which|And|But)\b", text), f"{module}:{node.lineno}"
