"""Studies whose documents, arrays, records, runs or trials are damaged: the report and the data frames are made, or
refused with one line.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.files import read_lines
from autotune.report.acceptance import acceptance
from autotune.report.content import Content
from autotune.report.page import render
from autotune.report.sources import find_sources
from autotune.study.frames import Study
from autotune.study.storage import LEDGER, PROFILE, RUNS, STUDY
from tests.mutations import damaged, json_bytes, mutate, nightly
from tests.report.conftest import MadeStudy

FEW = 2


def use(folder: Path) -> None:
    """The data frames and the page, in which no text has become a script."""
    study = Study(folder)
    study.runs_dataframe()
    study.trials_dataframe()
    assert "<script" not in render(Content(find_sources(folder)))


@pytest.fixture(scope="module")
def whole(made: MadeStudy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that is read as it is."""
    study = tmp_path_factory.mktemp("whole") / ".autotune" / "study"
    shutil.copytree(made.folder, study)
    lines = [json.loads(line) for line in (study / RUNS).read_text().splitlines()]
    rest = {"prompt": "p", "task": None, "new_tokens": 20, "accepted_lengths": [1, 2]}
    (study / RUNS).write_text("".join(json.dumps(rest | line) + "\n" for line in lines))
    use(study)
    return study


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the study that a test may damage."""
    study = tmp_path / ".autotune" / "study"
    shutil.copytree(whole, study)
    return study


def one_of(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[0]


FILES = (STUDY, PROFILE, "*.cost.json", "traces/*/*.trace.json", RUNS)


@nightly
@pytest.mark.parametrize("pattern", FILES)
def test_documents(pattern: str, is_nightly: bool, folder: Path) -> None:
    path = one_of(folder, pattern)
    text = path.read_text()
    content: Any = tuple(json.loads(line) for line in text.splitlines()) if pattern == RUNS else json.loads(text)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        use(folder)

    mutate(FEW, json_bytes(content), check, is_nightly)


@nightly
@pytest.mark.parametrize("pattern", ["traces/*/*.safetensors", LEDGER, LEDGER.replace("sqlite", "optuna")])
def test_bytes(pattern: str, is_nightly: bool, folder: Path) -> None:
    path = one_of(folder, pattern)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        use(folder)

    mutate(FEW, damaged(path.read_bytes()), check, is_nightly)


@nightly
@pytest.mark.parametrize("stage", ["subnets", "trees"])
def test_records(stage: str, is_nightly: bool, folder: Path) -> None:
    change = record_of(folder, stage)

    def check(data: bytes) -> None:
        change(data.decode(errors="replace"))
        use(folder)

    mutate(FEW, json_bytes(json.loads(change(None))), check, is_nightly)


def record_of(folder: Path, stage: str) -> Callable[[str | None], str]:
    """A function that replaces the text of the longest record of a stage, and returns what it was."""
    with closing(sqlite3.connect(folder / LEDGER)) as database:
        query = "select key, record from autotune_ledger where stage = ? order by length(record) desc"
        key, before = database.execute(query, (stage,)).fetchone()

    def change(text: str | None) -> str:
        with closing(sqlite3.connect(folder / LEDGER)) as database, database:
            if text is not None:
                database.execute("update autotune_ledger set record = ? where key = ?", (text, key))
        return str(before)

    return change


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        ("subnets", lambda record: {}),
        ("subnets", lambda record: {"subnets": 5}),
        ("subnets", lambda record: {"subnets": [record["subnets"][0] | {"speedup": "fast"}]}),
        ("subnets", lambda record: {"subnets": [record["subnets"][0] | {"speedup": 1e400}]}),
        ("trees", lambda record: {"fastest": [{}]}),
        ("trees", lambda record: {"fastest": 5}),
        ("trees", lambda record: {"fastest": [record["fastest"][0] | {"ms_per_token": None}]}),
        ("trees", lambda record: {"fastest": [record["fastest"][0] | {"configuration": {"tree": {"policy": "x"}}}]}),
    ],
)
def test_a_damaged_record_is_named(stage: str, change: Callable[[Any], Any], folder: Path) -> None:
    put = record_of(folder, stage)
    put(json.dumps(change(json.loads(put(None)))))
    with pytest.raises(UserError, match=r"ledger.sqlite: a record is damaged .*; restore the storage, or move it away"):
        find_sources(folder)


@pytest.mark.parametrize("content", [{"fastest": [{}]}, {"fastest": 5}, {"fastest": [{"configuration": {"tree": 5}}]}])
def test_a_data_frame_names_a_damaged_record(content: Any, folder: Path) -> None:
    record_of(folder, "trees")(json.dumps(content))
    with pytest.raises(UserError, match=r"ledger.sqlite: a record is damaged"):
        Study(folder).trials_dataframe()


@pytest.mark.parametrize("value", [None, [1.0], "fast"])
def test_a_data_frame_names_a_damaged_number(value: Any, folder: Path) -> None:
    put = record_of(folder, "trees")
    put(json.dumps({"fastest": [json.loads(put(None))["fastest"][0] | {"ms_per_token": value}]}))
    with pytest.raises(UserError, match=r"ledger.sqlite: a record is damaged"):
        Study(folder).trials_dataframe()


RUN_KEYS = ("arm", "prompt", "decode_ms", "acceptance_counts", "accepted_lengths", "new_tokens", "verify_ms")


def test_damaged_runs_are_one_line(folder: Path) -> None:
    lines, sources = [json.loads(line) for line in (folder / RUNS).read_text().splitlines()], find_sources(folder)
    for key in RUN_KEYS:
        for value in (None, "x", [1], {"a": 1}, -1, 10**30):
            damaged_lines = [lines[0] | {key: value}, *lines[1:]]
            (folder / RUNS).write_text("".join(json.dumps(line) + "\n" for line in damaged_lines))
            for read in (
                Study(folder).runs_dataframe,
                lambda: acceptance(replace(sources, runs=read_lines(folder / RUNS))),
            ):
                try:
                    read()
                except UserError as error:
                    assert "a run is damaged" in str(error), (key, value)
