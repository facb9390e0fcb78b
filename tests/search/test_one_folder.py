"""Several searches in one folder: none loses or replaces what another one has found."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.decoding_profile import DecodingProfile
from autotune.machine.device import fingerprint
from autotune.measuring.tables import priced_variants
from autotune.report.sources import find_sources
from autotune.search import pipeline, prices
from autotune.search.prices import save_table, table_for_gpu
from autotune.search.profile import predicted_profile
from autotune.search.tuning import Tuning
from autotune.study.search_settings import SearchSettings, check_settings
from tests.sample_documents import write_workload
from tests.tiny_models import Pair

SPACE = """
schema: autotune.search-space/1
name: small
visual_keep: [1.0]
trees: {chain: {depth: {low: 1, high: 2}}}
"""
LINES = [{"prompt": f"Count to {number}.", "max_new_tokens": 6, "split": "tune"} for number in range(3)]
HELD_OUT = [{"prompt": "Go on.", "max_new_tokens": 6, "split": "evaluate"}]


def made_table(tuning: Tuning, *_: object) -> CostTable:
    """A table of this device, in place of the measured one."""
    priced = priced_variants(tuning.variants)
    table = table_for_gpu("h100", tuning.pool, priced).model_copy(update={"device": fingerprint()})
    save_table(table, tuning.folder)
    return table


def known_of(profile: Path) -> tuple[Any, ...]:
    """The documents that a report of a profile is made of, and the command of its export."""
    found = find_sources(profile)
    assert found.profile is not None and found.study is not None and found.table is not None and found.notes == []
    assert found.study.profile == found.profile.content_hash and found.table.content_hash == found.study.cost_table
    assert {trace.header.workload_sha256 for trace in found.traces} == {found.profile.workload.tune_sha256}
    command = CliRunner().invoke(main, ["export", str(profile), "--models", "out", "--draft-tokens", "2"])
    assert command.exit_code == 0 or "without a draft" in command.output, command.output
    traces = sorted(trace.header.file for trace in found.traces)
    return found.profile, found.study, traces, found.candidates, command.output


def test_every_search_in_a_folder_keeps_its_results(
    text_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimates and a measurement of other prompts, budgets, devices and targets, in one study."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prices, "local_table", made_table)
    monkeypatch.setattr(pipeline, "choose_profile", lambda *given: predicted_profile(*given[:-1]))
    (tmp_path / "small.yaml").write_text(SPACE)
    write_workload(tmp_path, [*LINES, *HELD_OUT])
    write_workload(tmp_path, [*LINES[:2], *HELD_OUT], name="fewer.jsonl")
    other = shutil.copytree(text_pair.draft_folder, tmp_path / "other")
    for path in text_pair.target_folder.glob("tokenizer*"):
        shutil.copy(path, other)
    models = {"target": str(text_pair.target_folder), "drafts": (str(text_pair.draft_folder),)}
    base = {**models, "gpu": "h100", "workload": "workload.jsonl", "space": "small.yaml", "study": "one"}
    common: dict[str, Any] = {**base, "budget_s": 60.0, "num_trials": 1, "jobs": 1}
    runs: list[tuple[dict[str, Any], str]] = [
        ({"gpu": None, "device": "cpu"}, "profile.json"),
        ({}, "profile-h100.json"),
        ({"workload": "fewer.jsonl", "budget_s": 90.0}, "profile-h100-2.json"),
        ({"gpu": "a100", "target": str(other), "drafts": ("retrieval",)}, "profile-a100.json"),
        ({}, "profile-h100.json"),
    ]
    known: dict[str, tuple[Any, ...]] = {}
    for changes, name in runs:
        settings = check_settings(SearchSettings(**{**common, **changes}))
        assert settings.output == Path(name)
        profile = pipeline.search(settings, Console())
        assert DecodingProfile.load(name) == profile
        known[name] = known_of(Path(name))
    assert len(known) == 4 and len(list((tmp_path / ".autotune" / "one").glob("study-*.json"))) == 4
    assert {name: known_of(Path(name)) for name in known} == known
    for name in known:
        page = CliRunner().invoke(main, ["report", name])
        assert page.exit_code == 0 and "study in .autotune/one" in page.output, page.output
    pages = {"report.html", "report-h100.html", "report-h100-2.html", "report-a100.html"}
    assert {path.name for path in Path().glob("*.html")} == pages
