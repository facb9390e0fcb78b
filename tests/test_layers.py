"""Imports point one way, and what decides loads no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autotune"

# What each module, or each module of a folder, may import, at module level or inside a function. Modules of one entry
# may import each other; a longer name overrules its folder. From the bottom to the top.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "console": set(),
    "digits": {"errors", "files"},
    "files": {"errors"},
    "provenance": {"files"},
    "memory": {"errors"},
    "subnet": {"files"},
    "condition": {"files"},
    "workload": {"digits", "errors", "files"},
    "models": {"errors", "files", "memory", "provenance"},
    "trees": {"errors", "files"},
    # Documents, and what is computed from them.
    "acceptance.trace": {"errors", "files", "provenance", "subnet", "trees"},
    "acceptance.replay": {"acceptance.trace", "cost.table", "errors", "trees"},
    "acceptance.rounds": {"acceptance.replay", "acceptance.trace", "trees"},
    "cost.device": {"errors", "files"},
    "cost.surface": {"errors", "files", "trees"},
    "cost.table": {"cost.device", "cost.surface", "errors", "files", "provenance", "subnet", "trees"},
    "cost.sampling": {"cost.surface", "cost.table", "trees"},
    "cost.roofline": {"cost.device", "cost.surface", "cost.table", "files", "provenance", "subnet", "trees"},
    # Models at work.
    "runtime": {"condition", "drafters", "errors", "memory", "trees"},
    "drafters": {"errors", "files", "runtime", "subnet", "trees"},
    "drafters.checkpoint": {"drafters", "errors", "files", "models", "runtime", "subnet"},
    # The two places where the stages that make documents drive the runtime.
    "acceptance.recorder": {"acceptance.trace", "drafters", "files", "provenance", "runtime", "trees", "workload"},
    "cost.profiler": {
        "cost.device",
        "cost.sampling",
        "cost.table",
        "drafters",
        "errors",
        "provenance",
        "runtime",
        "trees",
        "workload",
    },
    # ``load`` makes a decoder of a profile: inside the function, so that searching over documents loads no torch.
    "decoding_profile": {
        "condition",
        "cost.device",
        "drafters",
        "errors",
        "files",
        "models",
        "provenance",
        "runtime",
        "subnet",
        "trees",
    },
    "runtime.service": {"decoding_profile", "runtime", "workload"},
    "training": {
        "acceptance.recorder",
        "console",
        "digits",
        "drafters",
        "errors",
        "files",
        "memory",
        "models",
        "runtime",
        "subnet",
        "workload",
    },
    "search.space": {"decoding_profile", "errors", "files", "subnet", "trees"},
    "search.screened": {"files", "search.space", "subnet"},
    "search.study_document": {"cost.device", "cost.table", "files", "provenance", "search.space"},
    "search.study_folder": {"acceptance.trace", "cost.table", "decoding_profile", "errors", "files"},
    "search.bootstrap": set(),
    "search.ledger": {"errors"},
    "search.evaluator": {
        "acceptance.replay",
        "acceptance.trace",
        "cost.table",
        "errors",
        "files",
        "search.sequoia",
        "search.space",
        "subnet",
        "trees",
    },
    "search.study": {
        "acceptance.replay",
        "errors",
        "files",
        "provenance",
        "search.bootstrap",
        "search.evaluator",
        "search.ledger",
        "search.space",
        "subnet",
        "trees",
    },
    "search.sequoia": {"acceptance.trace", "trees"},
    "search.points": {"condition"},
    "search.contenders": {
        "cost.device",
        "drafters",
        "errors",
        "files",
        "memory",
        "models",
        "provenance",
        "runtime",
        "search.finalists",
        "search.helpers",
        "search.space",
        "subnet",
        "trees",
    },
    "search.helpers": set(),
    "search.recording": {
        "acceptance.recorder",
        "acceptance.trace",
        "console",
        "search.contenders",
        "search.space",
        "workload",
    },
    "search.documents": {
        "acceptance.trace",
        "console",
        "cost",
        "errors",
        "files",
        "memory",
        "search.contenders",
        "search.ledger",
        "search.space",
        "workload",
    },
    "search.finalists": {
        "decoding_profile",
        "drafters",
        "errors",
        "files",
        "runtime",
        "search.bootstrap",
        "search.space",
        "workload",
    },
    "search.subnets": {
        "acceptance.recorder",
        "acceptance.trace",
        "console",
        "cost.table",
        "files",
        "provenance",
        "search.contenders",
        "search.evaluator",
        "search.finalists",
        "search.ledger",
        "search.screened",
        "search.space",
        "trees",
        "workload",
    },
    "search.judging": {
        "condition",
        "console",
        "cost.device",
        "cost.table",
        "decoding_profile",
        "profile_runner",
        "provenance",
        "search",
        "trees",
        "workload",
    },
    "search.main_job": {
        "acceptance.trace",
        "console",
        "cost.profiler",
        "cost.sampling",
        "cost.table",
        "decoding_profile",
        "errors",
        "files",
        "provenance",
        "search",
        "trees",
        "workload",
    },
    "profile_runner": {"condition", "decoding_profile", "runtime", "search.finalists", "workload"},
    "bench": {
        "console",
        "cost.device",
        "decoding_profile",
        "errors",
        "profile_runner",
        "provenance",
        "runtime",
        "search",
        "trees",
        "workload",
    },
    # autotune check: what decides, what runs.
    "check.sequential": set(),
    "check.power": {"check.sequential"},
    "check.worker": {"autotune"},  # the public interface alone: it is run by other versions
    "check.launch": {"errors", "files"},
    "check.pairs": {"check.launch", "check.sequential", "errors", "files", "workload"},
    "check.result": {"check.pairs", "cost.device", "decoding_profile", "files", "provenance"},
    "check.exact": {"check.launch", "check.result", "decoding_profile", "trees"},
    "check.baseline": {
        "check.result",
        "check.sequential",
        "cost.device",
        "decoding_profile",
        "errors",
        "files",
        "provenance",
    },
    "check.output": {"check.result", "files"},
    "check.timed": {"check.pairs", "check.power", "check.result", "check.sequential", "errors"},
    "check.revision": {"check.launch", "errors"},
    "check.here": {
        "check.exact",
        "check.result",
        "cost.device",
        "decoding_profile",
        "errors",
        "profile_runner",
        "provenance",
        "runtime",
        "search.finalists",
        "trees",
        "workload",
    },
    # Out of documents alone: of the search it may import what loads no torch.
    "report": {
        "acceptance.replay",
        "acceptance.rounds",
        "acceptance.trace",
        "console",
        "cost",
        "decoding_profile",
        "errors",
        "files",
        "models",
        "provenance",
        "search.evaluator",
        "search.ledger",
        "search.screened",
        "search.space",
        "search.study",
        "search.study_document",
        "search.study_folder",
        "subnet",
        "trees",
        "workload",
    },
    "check.against": {"check", "console", "decoding_profile", "errors", "files"},
    "check.job": {"check", "console", "cost.device", "decoding_profile", "errors", "files", "provenance", "workload"},
    "export.study": {
        "acceptance.trace",
        "cost.table",
        "decoding_profile",
        "errors",
        "files",
        "provenance",
        "search.study_folder",
        "subnet",
    },
    "export.tuned": {
        "acceptance",
        "condition",
        "decoding_profile",
        "errors",
        "export.study",
        "provenance",
        "search.evaluator",
        "search.space",
        "trees",
    },
    "export.choose": {"acceptance", "cost.table", "search.evaluator", "trees"},
    "export": {
        "acceptance.trace",
        "console",
        "cost.device",
        "decoding_profile",
        "errors",
        "files",
        "models",
        "provenance",
        "search.space",
        "trees",
    },
    "__main__": {"cli"},
    "cli": {
        "acceptance.trace",
        "bench",
        "check",
        "console",
        "cost",
        "errors",
        "export",
        "files",
        "models",
        "provenance",
        "report",
        "runtime",
        "search",
        "subnet",
        "trees",
        "training",
        "workload",
    },
}
# Searching over documents runs where torch is not installed, and `autotune --help` does not wait for it.
DECIDING = (
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
    "condition",
    "cost.device",
    "cost.roofline",
    "cost.sampling",
    "cost.surface",
    "cost.table",
    "decoding_profile",
    "errors",
    "export.job",
    "files",
    "memory",
    "models",
    "report.page",
    "search.helpers",
    "search.points",
    "search.screened",
    "search.sequoia",
    "search.space",
    "search.study",
    "search.study_document",
    "search.study_folder",
    "subnet",
    "trees.buckets",
    "trees.chain",
    "trees.eagle2",
    "trees.fallback",
    "trees.health",
    "trees.policy",
    "trees.sage",
    "trees.static",
    "trees.tree",
    "trees.verification",
    "trees.wetap",
    "workload",
)
HEAVY = {"torch", "transformers"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"}


def imports(path: Path, *, deferred: bool) -> Iterator[str]:
    """Full names of what a module imports; with ``deferred`` also inside functions. TYPE_CHECKING blocks do not count."""

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
    found = {name for name in imports(MODULES[module], deferred=deferred) if name.split(".")[0] == "autotune"}
    return {name.removeprefix("autotune.") for name in found}


def entry_of(module: str) -> str:
    """The entry of the table that speaks of a module: the longest that it begins with."""
    return max((name for name in ALLOWED if is_within(module, name)), key=len)


def is_within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    entry = entry_of(module)
    for imported in own_imports(module, deferred=True):
        allowed = any(is_within(imported, name) for name in {entry, *ALLOWED[entry]})
        assert allowed, f"{module} imports {imported}; {entry} may import {sorted(ALLOWED[entry])}"


def test_the_table_allows_nothing_that_is_not_used() -> None:
    """So that it says how things are: an edge that went away goes away here."""
    for entry, allowed in ALLOWED.items():
        modules = [module for module in MODULES if entry_of(module) == entry]
        assert modules, f"{entry} names no module"
        used = {imported for module in modules for imported in own_imports(module, deferred=True)}
        for name in allowed:
            assert any(is_within(imported, name) for imported in used), f"{entry} does not import {name}"


def test_module_level_imports_have_no_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a cycle: {' -> '.join([*above, module])}"
        if module not in done:
            for imported in own_imports(module, deferred=False) & set(MODULES):
                visit(imported, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", DECIDING)
def test_deciding_loads_no_torch(module: str) -> None:
    """Neither itself nor through what it imports, at module level."""
    reached, waiting = set(), [module]
    while waiting:
        current = waiting.pop()
        if current in reached or current not in MODULES:
            continue
        reached.add(current)
        outside = {name.split(".")[0] for name in imports(MODULES[current], deferred=False)}
        assert not outside & HEAVY, f"{module} reaches {current}, which imports {outside & HEAVY}"
        waiting += own_imports(current, deferred=False)


def test_the_package_itself_imports_nothing() -> None:
    """``import autotune`` is instant: its names are looked up when they are asked for."""
    for path in PACKAGE.rglob("__init__.py"):
        assert not [name for name in imports(path, deferred=False) if not name.startswith(("__future__", "typing"))]
