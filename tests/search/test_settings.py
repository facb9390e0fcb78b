"""The recorded command of a search repeats it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.search import pipeline
from autotune.search.settings import SearchSettings

PLAIN = SearchSettings(
    target="digits/target", drafts=("digits/star", "a path/with 'quotes'"), workload="my prompts.jsonl"
)
CHANGED = PLAIN.model_copy(
    update={
        "heads": 0.5,
        "injection_layer": 11,
        "space": "full",
        "temperature": 0.7,
        "budget_s": 90.5,
        "wait_until_quiet_s": 30.0,
        "num_trials": 7,
        "study": "x",
        "seed": 3,
        "capture_sizes": (4, 8),
        "measure": "all",
        "max_round_ms": 40.0,
        "max_draft_mib": 600.0,
        "output": Path("p.json"),
    }
)


def test_the_command_repeats_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(PLAIN.workload).write_text('{"prompt": "x"}\n')
    searched: list[SearchSettings] = []

    def search(settings: SearchSettings, console: object, *, started: float) -> None:
        searched.append(settings)

    monkeypatch.setattr(pipeline, "search", search)
    for settings in (PLAIN, CHANGED):
        done = CliRunner().invoke(main, shlex.split(settings.command)[1:], catch_exceptions=False)
        assert done.exit_code == 0 and searched.pop() == settings, done.output


def test_the_command_hides_the_database() -> None:
    assert "secret" not in PLAIN.model_copy(update={"storage": "postgresql://user:secret@host/db"}).command
