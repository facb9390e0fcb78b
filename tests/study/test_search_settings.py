"""The recorded command of a search repeats it, and its output replaces no other result."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.cli.preflight import workload_for
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import ModelReference, stamp
from autotune.errors import UserError
from autotune.files import WORKSPACE
from autotune.modeling.loading import DEFAULT_DRAFTS, RETRIEVAL, resolve
from autotune.search import pipeline
from autotune.study import outputs
from autotune.study.search_settings import SearchSettings, check_settings
from autotune.study.storage import study_folder
from tests.sample_documents import decoding_profile

PLAIN = SearchSettings(
    target="digits/target", drafts=("digits/star", "a path/with 'quotes'"), workload="my prompts.jsonl"
)
CHANGED = PLAIN.model_copy(
    update={
        "gpu": "h100",
        "device": "cpu",
        "changes": ("heads=0.5", "injection-layer=11", "d_max=4,8"),
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
    Path(PLAIN.workload).write_text('{"prompt": "x"}\n' * 2)
    searched: list[SearchSettings] = []

    def search(settings: SearchSettings, console: object) -> DecodingProfile:
        searched.append(settings)
        return decoding_profile()

    monkeypatch.setattr(pipeline, "search", search)
    for settings in (PLAIN, CHANGED):
        done = CliRunner().invoke(main, shlex.split(settings.command)[1:], catch_exceptions=False)
        assert done.exit_code == 0 and searched.pop() == check_settings(settings), done.output


def test_the_command_hides_the_database() -> None:
    assert "secret" not in PLAIN.model_copy(update={"storage": "postgresql://user:secret@host/db"}).command


def test_a_study_is_a_folder_of_the_workspace_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for name, message in (("./file", "choose another output with --study"), ("a\0", "cannot be written")):
        with pytest.raises(UserError, match=message):
            check_settings(SearchSettings(study=name))
    Path(".autotune/study").mkdir(parents=True)
    Path("study").mkdir()
    assert study_folder("study", Path("other"), WORKSPACE) == Path(".autotune/study")
    assert study_folder("./study", WORKSPACE) == Path("study")
    assert study_folder("new", WORKSPACE) == Path(".autotune/new")


# Settings with which a search is another one, and the output that it gets beside that of ``PLAIN``.
OTHERS: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "profile.json"),
    ({"jobs": 2, "table": Path("t.csv"), "storage": "sqlite:///x"}, "profile.json"),
    ({"budget_s": 60.0}, "profile-2.json"),
    ({"target": "other/target"}, "profile-2.json"),
    ({"space": "full"}, "profile-2.json"),
    ({"workload": "other.jsonl"}, "profile-2.json"),
    ({"drafts": ("retrieval",)}, "profile-2.json"),
    ({"study": "apart"}, "profile-2.json"),
    ({"device": "cuda:7"}, "profile-2.json"),
    ({"gpu": "h100"}, "profile-h100.json"),
)


@pytest.mark.parametrize(("changes", "name"), OTHERS)
def test_no_search_takes_the_output_of_another_one(
    changes: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``-o``, it gets the next free name; with it, the file is refused, unless it is free."""
    monkeypatch.chdir(tmp_path)
    profile, known = decoding_profile(), stamp(settings_key=PLAIN.key)
    profile.model_copy(update={"provenance": known}).save("profile.json")
    settings = PLAIN.model_copy(update=changes)
    chosen = check_settings(settings)
    assert chosen.output == Path(name) and check_settings(chosen) == chosen
    explicit = settings.model_copy(update={"output": Path("profile.json")})
    if name == "profile.json":
        assert check_settings(explicit) == chosen
    else:
        with pytest.raises(UserError, match=r"profile\.json: holds another result, .*; delete it, or give another -o"):
            check_settings(explicit)
        profile.save(name)  # of older versions, which have no key
        assert check_settings(settings).output == Path(name.replace(".json", "-2.json").replace("-2-2", "-3"))


def test_a_search_of_changed_prompts_or_on_another_machine_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    settings = PLAIN.model_copy(update={"workload": str(prompts)})
    keys = [settings.key]
    for text in ("a", "b"):
        prompts.write_text(text)
        keys.append(settings.key)
    monkeypatch.setattr(outputs, "local_gpus", lambda: ["h200"])
    assert len({*keys, settings.key}) == 4


@pytest.mark.parametrize("content", ["prompt", "{}", "[1]", '{"schema": "autotune.cost-table/1"}'])
def test_a_file_that_is_no_profile_is_not_replaced(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(content)
    assert check_settings(PLAIN).output == Path("profile-2.json")
    with pytest.raises(UserError, match="holds another result"):
        check_settings(PLAIN.model_copy(update={"output": Path("profile.json")}))
    Path("empty.json").touch()
    for free in ("empty.json", "/dev/null"):
        assert check_settings(PLAIN.model_copy(update={"output": Path(free)})).output == Path(free)


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


def test_a_profile_is_measured_on_its_own_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundled ones, or a file beside the profile or in this folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "profile.json"
    for name, expected in (
        ("smollm2", "smollm2"),
        ("chat,code", "chat,code"),
        ("a.jsonl", str(tmp_path / "a.jsonl")),
        ("b.jsonl", "b.jsonl"),
    ):
        profile = decoding_profile(ModelReference(id="some/model", sha256=""))
        own = profile.workload.model_copy(update={"name": name})
        profile.model_copy(update={"workload": own}).save(path)
        if "." in name:
            with pytest.raises(
                UserError, match=rf"{name}, are neither beside it nor in this folder; give --workload FILE"
            ):
                workload_for(path, None)
            Path(expected).touch()
        assert workload_for(path, None) == expected
    assert workload_for(path, "digits") == "digits"
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        workload_for(path, str(tmp_path / "missing.jsonl"))
