"""Compiled code is cached between processes, and made anew when a file of the package changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import autotune

# ``grow`` of ``chain.py`` calls ``add_child`` of ``tree.py``. Prints the rank of the node, and the functions loaded.
SCRIPT = """
import numpy as np
from autotune.trees import chain, tree
t, work = tree.new_tree(1), tree.new_workspace(1)
tree.set_root(t, 0, 0)
chain.grow(np.ones(1), t, work, np.zeros((1, 1), tree.CHILD))
print(t.rank[1], sum(chain.grow.stats.cache_hits.values()))
"""


def test_a_change_of_a_called_function_in_another_file_is_compiled(tmp_path: Path) -> None:
    """numba by itself renews the code of a changed file, and keeps that of its callers."""
    package = tmp_path / "autotune"
    shutil.copytree(Path(autotune.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "_data"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return [int(word) for word in done.stdout.split()]

    assert [run(), run()] == [[0, 0], [0, 1]], "the second process loads what the first has compiled"
    source = package / "trees" / "tree.py"
    source.write_text(source.read_text().replace("tree.rank[node] = rank\n", "tree.rank[node] = rank + 7\n"))
    assert run() == [7, 0]
    assert len(list((package / "trees" / "__pycache__").glob("compiled-*"))) == 1, (
        "the code of the old version is deleted"
    )
