"""The recorded command of a search repeats it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.cli.preflight import workload_for
from autotune.documents.provenance import ModelReference
from autotune.errors import UserError
from autotune.modeling.loading import DEFAULT_DRAFTS, RETRIEVAL, resolve
from autotune.search import pipeline
from autotune.search.settings import SearchSettings, check_settings
from tests.sample_documents import decoding_profile

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
        "wait_until_idle_s": 30.0,
        "num_trials": 7,
        "study": "x",
        "seed": 3,
        "capture_sizes": (4, 8),
        "measure": "all",
        "output": Path("p.json"),
    }
)


def test_the_command_repeats_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(PLAIN.workload).write_text('{"prompt": "x"}\n')
    searched: list[SearchSettings] = []

    def search(settings: SearchSettings, console: object) -> None:
        searched.append(settings)

    monkeypatch.setattr(pipeline, "search", search)
    for settings in (PLAIN, CHANGED):
        done = CliRunner().invoke(main, shlex.split(settings.command)[1:], catch_exceptions=False)
        assert done.exit_code == 0 and searched.pop() == settings, done.output


def test_the_command_hides_the_database() -> None:
    assert "secret" not in PLAIN.model_copy(update={"storage": "postgresql://user:secret@host/db"}).command


def test_a_study_is_a_folder_of_the_workspace() -> None:
    for name in ("../../outside", "/tmp/outside", "..", ".", "", "a/b", "a\0"):
        with pytest.raises(
            UserError, match=r"--study names a folder in \.autotune; got .*; give a name without slashes"
        ):
            check_settings(SearchSettings(study=name))


def test_drafts_and_prompts_default_to_those_of_the_targets_pair() -> None:
    assert (SearchSettings().drafts, SearchSettings().workload) == (DEFAULT_DRAFTS, "digits")
    other = SearchSettings(target="some/model", drafts=("some/draft",), workload="chat")
    assert (other.drafts, other.workload) == (("some/draft",), "chat")
    assert SearchSettings().has_default_drafts and not other.has_default_drafts
    with pytest.raises(UserError, match="some/model: the Hugging Face Hub does not answer"):  # of its drafts
        SearchSettings(target="some/model", workload="chat")
    smollm2 = SearchSettings(target="smollm2")
    assert smollm2.workload == "smollm2" and smollm2.drafts[-1] == RETRIEVAL
    assert all(name.startswith("smollm2/") for name in smollm2.drafts[:-1])
    assert SearchSettings(target="smollm2", drafts=(), workload="digits").workload == "digits"
    assert "--workload smollm2" in smollm2.command and f"--draft {RETRIEVAL}" in smollm2.command


def test_stored_heads_of_a_packaged_model_are_its_default_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once they have weights; its prompts are missed before anything is loaded."""
    monkeypatch.setattr("autotune.modeling.loading.data_root", lambda: tmp_path)
    monkeypatch.setattr("autotune.workloads.workload.data_root", lambda: tmp_path)
    folder = tmp_path / "drafts" / "smollm2" / "mtp"
    folder.mkdir(parents=True)
    assert SearchSettings(target="smollm2").drafts == (RETRIEVAL,)
    with pytest.raises(UserError, match="smollm2/mtp: no such model"):
        resolve("smollm2/mtp")
    (folder / "model.safetensors").touch()
    assert SearchSettings(target="smollm2").drafts == ("smollm2/mtp", RETRIEVAL)
    assert resolve("smollm2/mtp") == str(folder)
    for verb in ("search", "measure"):
        done = CliRunner().invoke(main, [verb, "--target", "smollm2"])
        assert done.exit_code == 2 and done.output.count("\n") == 1, done.output
        assert "workload.jsonl, is missing; name another --workload" in done.output


def test_a_profile_is_measured_on_its_own_prompts_or_those_of_its_pair(tmp_path: Path) -> None:
    for target, own, workload in (
        ("digits/target", "mine.jsonl", "digits"),
        ("smollm2", "mine.jsonl", "smollm2"),
        ("some/model", "digits", "digits"),
        ("some/model", "chat,code", "chat,code"),
        ("smollm2", "summarize", "summarize"),
    ):
        path = tmp_path / "profile.json"
        profile = decoding_profile(ModelReference(id=target, sha256=""))
        used = profile.workload.model_copy(update={"name": own})
        profile.model_copy(update={"workload": used}).save(path)
        assert workload_for(path, None) == workload
    assert workload_for(path, "digits") == "digits"
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        workload_for(path, str(tmp_path / "missing.jsonl"))
