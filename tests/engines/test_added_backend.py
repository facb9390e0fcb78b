"""The backend of ``docs/adding-a-backend.md``, added as the page says: one file and one row of the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.engines.backend import Backend
from autotune.engines.contract import BackendContract
from autotune.search import backends
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.imports import ROOT
from tests.pages import added_module, code_block

PAGE = "adding-a-backend.md"


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the page as a module, and its row in the table of backends."""
    added_module(PAGE, "autotune.engines.fake", monkeypatch)
    added_import, first_line, row = (line[1:] for line in code_block(PAGE, "diff").splitlines())
    assert first_line in (ROOT / "autotune" / "search" / "backends.py").read_text()
    names: dict[str, Any] = {}
    exec(f"{added_import}\nrows = {{{row}}}", names)
    monkeypatch.setitem(backends.BACKENDS, "fake", names["rows"]["fake"])


class TestAddedBackend(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return backends.BACKENDS["fake"]("a-model")

    @pytest.fixture
    def prompts(self) -> Sequence[WorkloadPrompt]:
        return [WorkloadPrompt(f"{n}", Prompt(prompt=f"{n} words.", max_new_tokens=n), ()) for n in (40, 7, 1)]


def test_it_is_searched_and_its_profile_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(map(bool, code_block(PAGE, "python").splitlines())) <= 60
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Count to {number}, then stop.", "max_new_tokens": 40} for number in range(40)]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def output(command: str) -> str:
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0, done.output
        return done.stdout

    answer = output("search --backend fake=a-model --workload prompts.jsonl --budget 60s")
    assert "\nChosen for fake: copy(16).\n4.33x as fast as plain decoding.\n" in answer
    assert output("export profile.json") == "fake-server a-model --draft 'copy(16)'\n"
    assert output("run profile.json --prompt abc --max-new-tokens 10") == "-bcabcabc-\n"
