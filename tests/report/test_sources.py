"""The documents of a report: those of the profile's own search."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.replay.trace import TraceHeader
from autotune.report.examples import TokenTexts, find_prompts
from autotune.report.sources import Sources, find_sources
from autotune.study.frames import Study
from autotune.study.storage import PROFILE, STUDY
from tests.report.conftest import EVIL, QUESTION, MadeStudy
from tests.sample_documents import DEVICE, decoding_profile, write_workload


@pytest.fixture
def copied(made: MadeStudy, tmp_path: Path) -> MadeStudy:
    """A copy of the study that a test may change."""
    shutil.copytree(made.profile_path.parent, tmp_path / "home")
    folder = tmp_path / "home" / made.folder.relative_to(made.profile_path.parent)
    return MadeStudy(folder, tmp_path / "home" / "profile.json", made.profile, made.study, made.traces, made.screened)


def test_profile_finds_the_study_beside_it(made: MadeStudy, sources: Sources) -> None:
    found = sources
    assert found.folder == made.folder and found.study == made.study and found.profile == made.profile
    assert found.table is not None and found.table.content_hash == made.study.cost_table
    assert sorted(found.screened, key=repr) == sorted(made.screened, key=repr)
    assert len(found.traces) == 2 and found.notes == []
    speeds = [one.ms_per_token for one in found.candidates]
    assert speeds == sorted(speeds) and len({one.key for one in found.candidates}) == len(found.candidates)
    by_folder = find_sources(made.folder)
    assert by_folder.profile == made.profile and by_folder.profile_path == made.folder / PROFILE


def test_a_profile_has_the_study_document_of_its_own_search(copied: MadeStudy) -> None:
    """By its content, and once it is edited by the settings; in one folder and among several, a newer one is passed
    over.
    """
    profile, own = copied.profile, copied.study.model_copy(update={"profile": copied.profile.content_hash})
    newer = copied.folder.with_name("tests-target-4567")
    shutil.copytree(copied.folder, newer)
    own.save(copied.folder / "study-a.json")
    profile.save(copied.folder / "profile-a.json")
    for folder in (copied.folder, newer):
        other = folder / "study-b.json"
        own.model_copy(update={"profile": "of another", "space": "another"}).save(other)
        os.utime(other, (2e9, 2e9))
        os.utime(folder, (2e9, 2e9))
    for path in (copied.profile_path, copied.folder / "profile-a.json"):
        found = find_sources(path)
        assert (found.folder, found.study) == (copied.folder, own)
        assert Study(copied.folder, profile).document == own
    for name in (copied.folder.name, str(copied.folder)):
        assert find_sources(copied.profile_path, study=name).study == own
    newest = find_sources(copied.folder)
    assert newest.study is not None and newest.study.space == "another" and newest.profile is None
    keyed = profile.provenance.model_copy(update={"settings_key": "k"})
    own.model_copy(update={"provenance": keyed}).save(copied.folder / "study-a.json")
    profile.model_copy(update={"provenance": keyed, "threads": 3}).save(copied.profile_path)
    edited = find_sources(copied.profile_path).study
    assert edited is not None and edited.provenance.settings_key == "k"


def test_traces_are_those_that_the_search_replayed(copied: MadeStudy) -> None:
    """Others of the same prompts, recorded with other bounds, belong to other searches."""
    paths = sorted(copied.folder.glob("traces/*/*.trace.json"))
    name = str(paths[0].relative_to(copied.folder))
    copied.study.model_copy(update={"traces": [name]}).save(copied.folder / STUDY)
    (trace,) = find_sources(copied.profile_path).traces
    assert trace.header.subnet == TraceHeader.load(paths[0]).subnet


def test_records_of_other_searches_are_ignored(copied: MadeStudy) -> None:
    few = copied.study.model_copy(update={"records": {"subnets": copied.study.records["subnets"][:3]}})
    few.save(copied.folder / STUDY)
    assert len(find_sources(copied.folder).screened) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"tune_sha256": "f" * 64},
        {"target": EVIL},
        {"drafts": []},
        {"hardware": DEVICE.model_copy(update={"model": "x"})},
    ],
)
def test_a_study_of_another_search_is_ignored_unless_given(copied: MadeStudy, changes: dict[str, Any]) -> None:
    copied.study.model_copy(update=changes).save(copied.folder / STUDY)
    assert find_sources(copied.profile_path).folder is None
    with pytest.raises(UserError, match=r"no study of .*profile.json is in this folder; give one"):
        find_sources(copied.profile_path, study=str(copied.folder))
    (copied.folder / STUDY).write_text('{"schema": "autotune.study/1"}')
    assert find_sources(copied.profile_path).folder is None, "it cannot be read"
    with pytest.raises(UserError, match=r"study\.json: "):
        find_sources(copied.profile_path, study=str(copied.folder))


def test_records_in_a_shared_database_need_storage(copied: MadeStudy, tmp_path: Path) -> None:
    (copied.folder / "ledger.sqlite").rename(tmp_path / "shared.sqlite")
    found = find_sources(copied.profile_path)
    assert not found.candidates and "give its URL with --storage" in found.notes[0]
    shared = find_sources(copied.profile_path, storage=f"sqlite:///{tmp_path / 'shared.sqlite'}")
    assert len(shared.screened) == len(copied.screened) and shared.candidates and shared.notes == []


def test_prompts_are_found_where_the_search_ran(sources: Sources) -> None:
    found = find_prompts(sources, None)
    assert [prompt.settings.prompt for prompt in found.values()] == [f"{QUESTION} {number}" for number in range(4)]
    assert [len(prompt.pixels) for prompt in found.values()] == [1, 0, 1, 0]


def test_prompts_that_changed_are_not_shown(copied: MadeStudy, tmp_path: Path) -> None:
    """A changed file is ignored, unless the user gives it."""
    changed = write_workload(copied.profile_path.parent, [{"prompt": "Another.", "split": "tune"}])
    sources = find_sources(copied.profile_path)
    assert find_prompts(sources, None) == {}
    with pytest.raises(UserError, match="differ from the recorded ones; give the search's own"):
        find_prompts(sources, str(changed))
    with pytest.raises(UserError, match="no such file"):
        find_prompts(sources, str(tmp_path / "nothing.jsonl"))


def test_tokens_as_text() -> None:
    """The texts of all tokens add up to the text, white space included."""
    from tokenizers import Tokenizer

    from autotune.modeling.loading import resolve

    tokens = TokenTexts("digits/target")
    text = "Row 1 reads 3, 1, 4.\nThat makes 6."
    numbers = Tokenizer.from_file(f"{resolve('digits/target')}/tokenizer.json").encode(text).ids
    assert (
        tokens.tokenizer is not None
        and "".join(tokens.text(numbers[:n], token) for n, token in enumerate(numbers)) == text
    )
    assert tokens.text([], -1) == "?"
    without = TokenTexts(decoding_profile().target.id)
    assert without.tokenizer is None and without.text([1], 17) == "[17]"
