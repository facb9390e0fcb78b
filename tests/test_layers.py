"""Imports point one way, and modules that only read documents load no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autotune"

# From the bottom to the top. A module may import modules of its own entry and of lower rows, at module level and inside
# functions alike. An entry is a module or a folder; of several entries that match a module, the longest counts.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("files", "console"),
    ("trees",),
    ("documents",),
    ("device", "execution", "workloads"),
    ("cost",),
    ("acceptance",),
    ("modeling",),
    ("drafters",),
    ("runtime",),
    ("acceptance.recorder", "cost.profiler"),  # these drive models to fill the documents of the layers below
    ("evaluation",),
    ("study",),
    ("search",),
    ("training",),
    ("report", "export", "check"),
    ("cli",),
    ("__main__",),
)
# Searching over documents and reading a report need no torch, and `autotune --help` does not wait for it.
TORCH_FREE = (
    "acceptance.replay",
    "acceptance.rounds",
    "acceptance.trace",
    "check.baseline",
    "check.exact",
    "check.output",
    "check.power",
    "check.revision",
    "check.sequential",
    "check.timed",
    "cli",
    "cost.roofline",
    "cost.sampling",
    "cost.surface",
    "cost.table",
    "device",
    "documents",
    "errors",
    "execution",
    "export",
    "files",
    "modeling.loading",
    "report",
    "search.evaluator",
    "search.point_selection",
    "search.sequoia",
    "search.space",
    "search.tree_search",
    "search.worker_pool",
    "study",
    "trees",
    "workloads.workload",
)
HEAVY = {"torch", "transformers"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"}


def imports(path: Path, *, deferred: bool) -> Iterator[str]:
    """Full names of imported modules; ``deferred`` includes imports inside functions. TYPE_CHECKING blocks do not count."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not deferred:
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0 and child.module, f"{path}: imports are absolute"
                # ``from autotune.trees import sage`` names a module, ``from autotune.files import parse`` does not.
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield full if full.removeprefix("autotune.") in MODULES else child.module
            yield from walk(child)

    return walk(ast.parse(path.read_text()))


def own_imports(module: str, *, deferred: bool) -> set[str]:
    """Modules of the package that a module imports, without the leading ``autotune.``."""
    found = {name for name in imports(MODULES[module], deferred=deferred) if name.split(".")[0] == "autotune"}
    return {name.removeprefix("autotune.") for name in found} & set(MODULES)


def is_within(module: str, entry: str) -> bool:
    return module == entry or module.startswith(f"{entry}.")


def layer_of(module: str) -> tuple[int, str]:
    """Row and entry of a module in ``LAYERS``."""
    rows = [(number, entry) for number, row in enumerate(LAYERS) for entry in row if is_within(module, entry)]
    assert rows, f"{module} belongs to no layer; name it in LAYERS"
    return max(rows, key=lambda found: len(found[1]))


def test_imports_point_one_way() -> None:
    for module in MODULES:
        row, entry = layer_of(module)
        for imported in own_imports(module, deferred=True):
            below, other = layer_of(imported)
            assert below < row or other == entry, f"{module} imports {imported}, which is not below it"


def test_every_layer_names_modules() -> None:
    used = {layer_of(module)[1] for module in MODULES}
    assert used == {entry for row in LAYERS for entry in row}


def test_imports_have_no_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a cycle: {' -> '.join([*above, module])}"
        if module not in done:
            for imported in own_imports(module, deferred=True):
                visit(imported, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("entry", TORCH_FREE)
def test_importing_loads_no_torch(entry: str) -> None:
    """Neither directly nor through another module, at module level."""
    modules = [module for module in MODULES if is_within(module, entry)]
    assert modules, f"{entry} names no module"
    reached, waiting = set(), modules
    while waiting:
        current = waiting.pop()
        if current in reached:
            continue
        reached.add(current)
        outside = {name.split(".")[0] for name in imports(MODULES[current], deferred=False)}
        assert not outside & HEAVY, f"{entry} reaches {current}, which imports {outside & HEAVY}"
        waiting += own_imports(current, deferred=False)


def test_the_package_itself_imports_nothing() -> None:
    """``import autotune`` is instant: its names are looked up when they are asked for."""
    for path in PACKAGE.rglob("__init__.py"):
        assert not [name for name in imports(path, deferred=False) if not name.startswith(("__future__", "typing"))]
