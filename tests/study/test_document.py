"""What a search leaves behind, and how to ask for it again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.errors import UserError
from autotune.search import pipeline
from autotune.search.settings import SearchSettings
from autotune.study.document import STUDY, StudyDocument, load_study, save_study
from autotune.study.ledger import Ledger
from tests.sample_documents import DEVICE, PROVENANCE, TARGET

PLAIN = SearchSettings(
    target="digits/target", drafts=("digits/star", "a path/with 'quotes'"), workload="my prompts.jsonl"
)


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        PLAIN.model_copy(
            update={
                "heads": 0.5,
                "injection_layer": 11,
                "space": "full",
                "budget_s": 90.5,
                "num_trials": 7,
                "study": "x",
                "seed": 3,
                "capture_sizes": (4, 8),
                "measure": "all",
                "max_round_ms": 40.0,
                "max_draft_mib": 600.0,
                "output": Path("p.json"),
            }
        ),
    ],
)
def test_the_command_asks_for_the_same_search(
    settings: SearchSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(settings.workload).write_text('{"prompt": "Hello"}\n')
    asked: list[SearchSettings] = []

    def search(settings: SearchSettings, console: object, *, started: float) -> None:
        asked.append(settings)

    monkeypatch.setattr(pipeline, "search", search)
    done = CliRunner().invoke(main, shlex.split(settings.command)[1:], catch_exceptions=False)
    assert done.exit_code == 0 and asked == [settings]


def test_the_command_keeps_a_database_to_itself() -> None:
    assert "secret" not in PLAIN.model_copy(update={"storage": "postgresql://user:secret@host/db"}).command


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = {"num_layers": 1, "hidden_size": 8, "text_parameters": 9, "vision_parameters": 0}
    study = StudyDocument(
        provenance=PROVENANCE,
        command="autotune search",
        target=TARGET,
        target_shape={**made, "kv_bytes_per_token": 4, "bytes_per_parameter": 4},  # type: ignore[arg-type]
        drafts=[],
        hardware=DEVICE,
        workload="digits",
        tune_sha256="c" * 64,
        space="quick",
        cost_table="0123",
        records={"trees": ["a", "b"]},
        sampled="trees-0",
    )
    assert load_study(tmp_path) is None
    save_study(tmp_path, study)
    assert load_study(tmp_path) == study
    content = json.loads((tmp_path / STUDY).read_text())
    (tmp_path / STUDY).write_text(json.dumps({**content, "comand": "x"}))
    with pytest.raises(UserError, match="unknown key 'comand'; did you mean 'command'"):
        load_study(tmp_path)


def test_a_ledger_knows_which_records_were_used(tmp_path: Path) -> None:
    """By this worker's calls, whoever made them."""
    ledger, other = Ledger(tmp_path / "l"), Ledger(tmp_path / "l")
    other.work("trees", {"z": lambda: {}, "a": lambda: {}})
    ledger.work("trees", {"a": lambda: {}, "m": lambda: {}})
    ledger.work("subnets", {"s": lambda: {}})
    assert ledger.used_keys == {"trees": ["a", "m"], "subnets": ["s"]}
