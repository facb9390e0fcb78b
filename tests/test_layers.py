"""Imports point one way, and modules that only read documents load no torch."""

from __future__ import annotations

import ast

import pytest

from autotune.documents.draft_kinds import KINDS
from autotune.errors import EXTRAS
from tests.imports import MODULES, heavy_import, imported_names, own_imports

# From the bottom to the top, one row for a floor. A module may import modules of its own entry and of lower rows, at
# module level and inside functions alike.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "strict_parsing", "table"),
    ("files", "console"),
    ("trees",),
    ("documents",),
    ("machine", "workloads", "cost"),
    ("replay", "modeling"),
    ("drafters", "study"),
    ("runtime", "report"),
    ("recording", "measuring", "evaluation", "serve", "engines"),
    ("search", "training", "doctor", "check"),
    ("cli", "schemas"),
    ("__main__",),
)
# Searching over documents and reading a report need no torch, and `autotune --help` does not wait for it.
TORCH_FREE = (
    "replay.replay",
    "replay.reference_replay",
    "replay.trace",
    "check.checked",
    "check.comparison",
    "check.gates",
    "check.in_engine",
    "check.job",
    "check.output",
    "check.versions",
    "evaluation.not_slower",
    "check.settings",
    "cli",
    "measuring.jobs",
    "cost.request_costs",
    "cost.roofline",
    "measuring.sampling",
    "cost.surface",
    "cost.table",
    "doctor.diagnosis",
    "documents",
    "errors",
    "evaluation.arms",
    "evaluation.race",
    "evaluation.runner",
    "evaluation.bench",
    "evaluation.bench_tables",
    "evaluation.profile_difference",
    "evaluation.summary",
    "engines",
    "files",
    "machine",
    "modeling.loading",
    "replay",
    "report",
    "search.backend_race",
    "search.backends",
    "search.engine_tuning",
    "search.evidence",
    "search.thresholds",
    "search.tree_search",
    "strict_parsing",
    "study",
    "trees",
    "workloads.workload",
)
# What the verbs import for an engine, in an install without extras (tests/engines/test_core.py runs it).
CORE = ("cli", "engines", "search.backend_race", "search.engine_tuning", "check.job", "evaluation.bench", "report.page")
PACKAGE = {name.removeprefix("autotune."): path for name, path in MODULES.items() if name.startswith("autotune.")}


def package_imports(module: str) -> set[str]:
    """Modules of the package that a module imports, inside functions too, without the leading ``autotune.``."""
    found = own_imports(f"autotune.{module}", deferred=True)
    return {name.removeprefix("autotune.") for name in found} & PACKAGE.keys()


def is_within(module: str, entry: str) -> bool:
    return module == entry or module.startswith(f"{entry}.")


def layer_of(module: str) -> tuple[int, str]:
    """Row and entry of a module in ``LAYERS``."""
    rows = [(number, entry) for number, row in enumerate(LAYERS) for entry in row if is_within(module, entry)]
    assert rows, f"{module} belongs to no layer; name it in LAYERS"
    return max(rows, key=lambda found: len(found[1]))


def test_imports_point_one_way() -> None:
    for module in PACKAGE:
        row, entry = layer_of(module)
        for imported in package_imports(module):
            below, other = layer_of(imported)
            assert below < row or other == entry, f"{module} imports {imported}, which is not below it"


def test_every_layer_names_modules() -> None:
    used = {layer_of(module)[1] for module in PACKAGE}
    assert used == {entry for row in LAYERS for entry in row}


def test_imports_have_no_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a cycle: {' -> '.join([*above, module])}"
        if module not in done:
            for imported in package_imports(module):
                visit(imported, (*above, module))
            done.add(module)

    for module in PACKAGE:
        visit(module, ())


@pytest.mark.parametrize("entry", TORCH_FREE)
def test_importing_loads_no_torch(entry: str) -> None:
    """Neither directly nor through another module, at module level."""
    modules = [module for module in PACKAGE if is_within(module, entry)]
    assert modules, f"{entry} names no module"
    for module in modules:
        assert heavy_import(f"autotune.{module}") is None, f"importing {module} loads torch"


@pytest.mark.parametrize("entry", CORE)
def test_importing_the_core_needs_no_extra(entry: str) -> None:
    modules = [module for module in PACKAGE if is_within(module, entry)]
    assert modules, f"{entry} names no module"
    for module in modules:
        reached = heavy_import(f"autotune.{module}", frozenset(EXTRAS))
        assert reached is None, f"importing {module} needs an extra, through {reached}"


def test_the_package_itself_imports_nothing() -> None:
    """``import autotune`` is instant: its names are looked up when they are asked for."""
    for path in (path for path in MODULES.values() if path.name == "__init__.py"):
        assert {name.partition(".")[0] for name in imported_names(path, deferred=False)} <= {"__future__", "typing"}


DRAFT_CLASSES = {
    node.name
    for name, path in PACKAGE.items()
    if name.startswith("drafters.")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.ClassDef)
}


def draft_tests(source: str) -> list[str]:
    """Where code asks which kind a draft is: ``isinstance`` with a class of ``drafters/``, or a kind compared with a
    name.
    """
    asked = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            named = {child.id for child in ast.walk(node.args[1]) if isinstance(child, ast.Name)}
            asked += [ast.unparse(node)] if named & DRAFT_CLASSES else []
        elif isinstance(node, ast.Compare):
            words = {child.value for child in ast.walk(node) if isinstance(child, ast.Constant)}
            asked += [ast.unparse(node)] if "kind" in ast.unparse(node) and words & KINDS.keys() else []
    return asked


def test_only_the_drafters_ask_which_kind_a_draft_is() -> None:
    assert draft_tests("if isinstance(draft, FeatureDraft | TokenDraft) or draft.kind != 'star': pass") != []
    assert draft_tests("kind in ('eagle3', 'mtp')") != []
    for module, path in PACKAGE.items():
        if not is_within(module, "drafters"):
            assert draft_tests(path.read_text()) == [], f"{module}: let the class in drafters/ answer"
