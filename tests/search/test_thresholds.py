"""The documentation shows every threshold of a search."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

from autotune.search import thresholds
from tests.imports import MODULES

PAGE = Path(__file__).parents[2] / "docs" / "search.md"


def comment_above(lines: list[str]) -> str:
    """The comment that ends the lines."""
    comment = itertools.takewhile(lambda line: line.startswith("# "), reversed(lines))
    return " ".join(line.removeprefix("# ") for line in reversed(list(comment)))


def test_the_table_of_the_documentation_is_that_of_the_module() -> None:
    """Name, value and comment of every constant."""
    source = MODULES["autotune.search.thresholds"].read_text()
    constants = [node for node in ast.parse(source).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    lines = source.splitlines()
    comments = [lines[n.end_lineno - 1].partition("  # ")[2] or comment_above(lines[: n.lineno - 1]) for n in constants]
    names = [ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) for node in constants]
    shown = re.findall(r"^\| `([A-Z_]+)` \| `(.+?)` \| (.+) \|$", PAGE.read_text(), flags=re.M)
    assert len(names) > 20 and all(comments)
    assert [(name, ast.literal_eval(value), text) for name, value, text in shown] == [
        (name, getattr(thresholds, name), text) for name, text in zip(names, comments, strict=True)
    ]
