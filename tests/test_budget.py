"""The package stays small enough to be read: a line for a line, and few floors."""

from __future__ import annotations

from tests.imports import MODULES
from tests.test_layers import LAYERS

MOST_LINES = 36_965
MOST_LINES_OF_A_MODULE = 400
MOST_LAYERS = 12

LENGTHS = {
    name: len(path.read_text().splitlines()) for name, path in MODULES.items() if name.partition(".")[0] == "autotune"
}


def test_the_package_keeps_to_its_lines() -> None:
    total = sum(LENGTHS.values())
    assert total <= MOST_LINES, (
        f"autotune/ has {total} lines, and {MOST_LINES} are allowed: delete what no measurement in benchmarks/ shows to be "
        "worth having, fold what became simpler, or say in the commit which ability the further lines pay for"
    )


def test_no_module_is_longer_than_one_can_read() -> None:
    long = {name: length for name, length in LENGTHS.items() if length > MOST_LINES_OF_A_MODULE}
    assert not long, (
        f"modules of more than {MOST_LINES_OF_A_MODULE} lines: {long}; find the name of one half, and move it to a module of that name"
    )


def test_imports_have_few_floors() -> None:
    assert len(LAYERS) <= MOST_LAYERS, (
        f"LAYERS has {len(LAYERS)} rows, and {MOST_LAYERS} are allowed: put the new module into the lowest row above what it "
        "imports, or turn the import that needs another row around"
    )
