"""The backend of ``docs/adding-a-backend.md``, added as the page says: one file and one row of the table."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.documents.decoding_profile import DecodingProfile
from autotune.engines.backend import Backend
from autotune.engines.contract import BackendContract
from autotune.search import backends
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.imports import ROOT

PAGE = (ROOT / "docs" / "adding-a-backend.md").read_text()


def block(language: str) -> str:
    """The page's code block of a language; there is one of each."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S)
    return str(found)


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file of the page as a module, and its row in the table of backends."""
    module = ModuleType("autotune.engines.fake")
    exec(compile(block("python"), "autotune/engines/fake.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    added_import, first_line, row = block("diff").splitlines()
    names: dict[str, type[Backend]] = {}
    exec(added_import.removeprefix("+"), names)
    assert first_line.strip() in (ROOT / "autotune" / "search" / "backends.py").read_text()
    for name, backend in eval(f"{{{row.removeprefix('+')}}}", names).items():
        monkeypatch.setitem(backends.BACKENDS, name, backend)
    return module


def test_the_file_has_at_most_60_lines_of_code() -> None:
    assert 0 < sum(map(bool, block("python").splitlines())) <= 60


class TestAddedBackend(BackendContract):
    @pytest.fixture
    def backend(self, added: ModuleType) -> Backend:
        backend = added.FakeBackend("a model")
        assert isinstance(backend, Backend)
        return backend

    @pytest.fixture
    def prompts(self) -> Sequence[WorkloadPrompt]:
        texts = {"Count to ten.": 40, "Sort it.": 7, "One word?": 1}
        return [WorkloadPrompt(text, Prompt(prompt=text, max_new_tokens=n), ()) for text, n in texts.items()]


def test_it_is_searched_and_its_profile_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Count to {number}, then stop.", "max_new_tokens": 40} for number in range(40)]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def output(*words: str) -> str:
        done = CliRunner().invoke(main, list(words))
        assert done.exit_code == 0, done.output
        return done.stdout

    answer = output("search", "--backend", "fake=a-model", "--workload", "prompts.jsonl", "--budget", "60s")
    assert "Chosen for fake: copy(16)." in answer
    profile = DecodingProfile.load(Path("profile.json"))
    assert profile.backend == "fake" and profile.point.measured is not None
    assert profile.point.measured.speedup == pytest.approx(4.33, abs=0.01)
    assert output("export", "profile.json") == "fake-server a-model --draft 'copy(16)'\n"
    assert output("run", "profile.json", "--prompt", "abc", "--max-new-tokens", "10") == "-bcabcabc-\n"
