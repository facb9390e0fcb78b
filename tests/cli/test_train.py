"""``autotune train``: what is refused before torch and transformers are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.imports import ROOT
from tests.training.conftest import STAGE, write_examples, write_recipe

HEADS: dict[str, Any] = {"draft": {}, "stages": [STAGE]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt key": ({"modle": "star"}, "unknown key 'modle'; did you mean 'model'?"),
    "unknown kind": ({"model": "stra"}, "got 'stra'; fix that value"),
    "contradiction": ({**HEADS, "model": "mtp", "draft": {"mlp_size": 4}}, "got draft {'mlp_size': 4}; remove it"),
    "no target": ({"teacher": "no/where"}, "no/where"),
    "no examples": ({"data": {"file": "gone.jsonl"}}, "gone.jsonl: no such file; check the path"),
    "invalid examples": (
        {"data": {"file": "wrong.jsonl"}},
        "wrong.jsonl:1: unknown key 'anwser'; did you mean 'answer'?",
    ),
}
PROGRAM = """
import sys
from autotune.cli.main import main

for path in sys.argv[1:]:
    try:
        main(["train", path])
    except SystemExit as error:
        print(error.code, *{"torch", "transformers"}.intersection(sys.modules), file=sys.stderr)
"""


def test_a_recipe_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    write_examples(tmp_path / "examples.jsonl")
    (tmp_path / "wrong.jsonl").write_text(json.dumps({"prompt": "x", "anwser": "y"}))
    teacher = str(ROOT / "drafts" / "digits" / "target")
    paths = [
        write_recipe(tmp_path / f"{number}.yaml", **{"teacher": teacher, **changes})
        for number, (changes, _) in enumerate(REFUSED.values())
    ]
    command = [sys.executable, "-c", PROGRAM, *map(str, paths)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["2"] * len(paths), done.stderr
    for line, (_, message) in zip(lines[::2], REFUSED.values(), strict=True):
        assert message in line
