"""The policy of ``docs/adding-a-policy.md``, added as the page says: one file and one line of the table."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import autotune
from autotune.files import data_root
from tests.imports import ROOT
from tests.pages import code_block

pytest.importorskip("torch", exc_type=ImportError)

PAGE = "adding-a-policy.md"


@pytest.mark.nightly
def test_the_policy_of_the_page_decodes_replays_and_is_searched(tmp_path: Path) -> None:
    package = tmp_path / "autotune"
    shutil.copytree(Path(autotune.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "_data"))
    (tmp_path / "search_spaces").symlink_to(data_root() / "search_spaces")
    (package / "trees" / "beam.py").write_text(code_block(PAGE, "python"))
    table = package / "trees" / "policy.py"
    added_import, first_line, added_entry = (line[1:] + "\n" for line in code_block(PAGE, "diff").splitlines())
    assert table.read_text().count(first_line) == 1
    table.write_text(table.read_text().replace(first_line, added_import + first_line + added_entry))
    space = tmp_path / "space.yaml"
    trees = yaml.safe_load(code_block(PAGE, "yaml"))
    known = {"schema": "autotune.search-space/1", "name": "beam", "visual_keep": [1.0]}
    space.write_text(yaml.safe_dump(known | trees))

    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "NUMBA_OPT": "0",  # for a short compilation
    }
    environment.pop("NUMBA_CACHE_DIR", None)
    (described,) = re.findall(r"`(\{\"policy\": \"beam\".*?\})`", (ROOT / "docs" / PAGE).read_text())
    command = [sys.executable, "-m", "tests.trees.added_policy", str(tmp_path / "run"), described, str(space)]
    (tmp_path / "run").mkdir()
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["accepted"] > 0
    assert {(tree["policy"], tree["depth"], tree["width"]) for tree in result["found"]} == {
        ("beam", depth, width) for depth in (2, 3, 4) for width in (1, 2, 3)
    }
