"""The documentation shows every threshold of a search."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from autotune.search import thresholds
from tests.imports import MODULES

PAGE = Path(__file__).parents[2] / "docs" / "search.md"


def table_of(source: str) -> dict[str, tuple[object, str]]:
    """Value and docstring of every constant of the module, by name."""
    body = ast.parse(source).body
    targets = [node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None) for node in body]
    return {
        target.id: (getattr(thresholds, target.id), ast.unparse(docstring).strip("'\""))
        for target, docstring in zip(targets, body[1:], strict=False)
        if isinstance(target, ast.Name)
    }


def test_the_table_of_the_documentation_is_that_of_the_module() -> None:
    shown = re.findall(r"^\| `([A-Z_]+)` \| `(.+?)` \| (.+) \|$", PAGE.read_text(), flags=re.M)
    known = table_of(MODULES["autotune.search.thresholds"].read_text())
    assert len(known) > 20
    assert [(name, ast.literal_eval(value), text) for name, value, text in shown] == [
        (name, value, text) for name, (value, text) in known.items()
    ]
