"""The corpus keeps its splits apart, and skips what is generated, copied or not Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.files import data_root, read_json
from autotune.workloads.code import corpus as sources
from autotune.workloads.code.corpus import CODE_SPLITS, CodeFile, common_lines, packages, share_known

PERMISSIVE = {"MIT", "PSF-2.0", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0 OR BSD-2-Clause"}
FUNCTION = 'def f(value):\n    """Return twice the value, which may be any number or any sequence of numbers and texts."""\n    return value + value\n'


def test_every_package_has_one_split_and_a_permissive_licence() -> None:
    names = [name for split in CODE_SPLITS for name in packages().of(split)]
    assert len(names) == len(set(names))
    assert {licence for split in CODE_SPLITS for licence in packages().of(split).values()} <= PERMISSIVE


def test_the_stored_inventory_is_of_these_packages() -> None:
    """The versions, licences and sizes of the corpus from which the stored prompts and weights are."""
    rows = read_json(data_root() / "drafts" / "code" / "corpus.json")
    for row in rows:
        assert row["package"] == "python" or packages().of(row["split"])[row["package"]] == row["licence"]
        assert row["files"] > 0 and row["characters"] > 0 and row["version"]
    assert sum(row["characters"] for row in rows if row["split"] == "train") > 3e7


def test_the_standard_library_is_divided_by_module() -> None:
    splits = {
        sources._module_split(name) for name in ("json", "ast.py", "os.py", "email", "asyncio", "re", "csv.py", "io.py")
    }
    assert "train" in splits and len({sources._module_split(f"module{i}") for i in range(99)}) == 3
    assert sources._module_split("_strptime.py") == sources._module_split("strptime")


def test_files_of_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = FUNCTION * 6
    written = {
        "a.py": long,
        "copy.py": long,
        "generated.py": f"# This file was automatically generated.\n{long}",
        "broken.py": f"{long}\ndef (",
        "short.py": FUNCTION,
        "accent.py": f"# \u00e9\n{long}",
        "tab.py": long.replace("    ", "\t") + "x = 1\n",
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    paths = [("package", tmp_path, sorted(tmp_path.glob("*.py")))]
    monkeypatch.setattr(sources, "_package_paths", lambda split: iter(paths))
    files = list(sources._read_files("train"))
    assert len(files) == 2 and {file.path for file in files} <= {"a.py", "copy.py", "tab.py"}
    for file in files:
        assert "\t" not in file.text and len(file.functions) == 6
        first, last = file.functions[0]
        assert file.lines[first].startswith("def f") and file.lines[last].endswith("value + value")


def test_shares_of_known_lines() -> None:
    known = common_lines((CodeFile("p", "a.py", FUNCTION, ()),))
    assert share_known(FUNCTION, known) == 1.0 and share_known("def g():\n    return 1", known) == 0.0
    assert share_known(FUNCTION + "a_line_of_more_than_thirty_characters = 1", known) == 0.5
