"""Imports of the modules of the package and of the tests, read from their source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("autotune", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
"""Source files by full module name."""
HEAVY = frozenset({"torch", "transformers"})


@functools.cache
def imported_names(path: Path, *, deferred: bool) -> tuple[str, ...]:
    """Full names of imported modules; ``deferred`` includes imports inside functions and for type checking."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not deferred:
                continue
            if (
                isinstance(child, ast.Try)
                and "ModuleNotFoundError" in " ".join(map(ast.unparse, child.handlers))
                and not deferred
            ):
                continue  # the module goes on without it
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not deferred:
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0 and child.module, f"{path}: imports are absolute"
                # ``from autotune.trees import sage`` names a module, ``from autotune.files import parse`` does not.
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield full if full in MODULES else child.module
            yield from walk(child)

    return tuple(walk(ast.parse(path.read_text())))


@functools.cache
def own_imports(module: str, *, deferred: bool) -> frozenset[str]:
    """Modules in ``MODULES`` that a module imports."""
    return frozenset(imported_names(MODULES[module], deferred=deferred)) & MODULES.keys()


@functools.cache
def heavy_import(module: str, heavy: frozenset[str] = HEAVY) -> str | None:
    """The module through which importing ``module`` loads one of some packages; None if it loads none."""
    reached, waiting = set(), [module]
    while waiting:
        current = waiting.pop()
        if current in reached:
            continue
        reached.add(current)
        if heavy & {name.partition(".")[0] for name in imported_names(MODULES[current], deferred=False)}:
            return current
        waiting += own_imports(current, deferred=False)
    return None
