"""Figures, tables and numbers in README and docs, also in sentences, are those of the results in ``benchmarks``."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from autotune.files import read_yaml
from benchmarks import measure
from benchmarks.evidence import drawing, pages, searches
from benchmarks.evidence.result import ROOT, Result, load_all
from benchmarks.evidence.sentences import SENTENCES, Number, sentences_of
from benchmarks.measure import acceptance_rows, derived

RESULTS = load_all()


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_pages_show_what_the_results_give(page: Path) -> None:
    assert pages.problems(page.read_text(), RESULTS, page) == []


def test_figures_are_drawn_from_the_results() -> None:
    assert drawing.wrong_pictures(RESULTS) == []
    shown = {
        name for page in pages.pages() for kind, name, _ in pages.MARKED.findall(page.read_text()) if kind == "figure"
    }
    assert shown == set(drawing.PICTURES)


@pytest.mark.parametrize("edited", ["1.01x", "| 9.99x |", "**12.34x**"])
def test_a_number_that_is_edited_by_hand_fails(edited: str) -> None:
    """Inside of a marker, and outside of one."""
    page = ROOT / "docs" / "benchmarks.md"
    text = page.read_text()
    value = next(
        match for match in pages.MARKED.finditer(text) if match[1] == "table" and pages.SPEEDUP.search(match[0])
    )
    inside = text.replace(value[0], pages.SPEEDUP.sub(edited, value[0], count=1))
    assert [line for line in pages.problems(inside, RESULTS, page) if f"{value[1]} {value[2]} is not" in line]
    outside = pages.problems(f"{text}\nIt is {edited} as fast.\n", RESULTS, page)
    assert len(outside) == 1 and "stands outside of markers" in outside[0]
    assert pages.problems(f"{text}\n```text\nIt is {edited} as fast.\n```\n", RESULTS, page) == []
    assert "no table or figure" in pages.problems(text.replace(value[2], "nothing"), RESULTS, page)[0]


def test_every_sentence_with_a_number_is_checked() -> None:
    """A sentence fails once its words or its number change, and a page has no marker in a sentence."""
    checked = [(page, sentence) for page in pages.pages() for sentence in sentences_on(page)]
    assert checked
    for page, sentence in checked:
        text = " ".join(page.read_text().split())
        assert text.count(sentence) == 1
        number = re.findall(r"\d+\.\d+", sentence)[-1]
        for edited in (sentence.replace(number, f"{float(number) + 0.01:.2f}"), sentence.replace("a", "e", 1)):
            assert any(sentence in line for line in pages.problems(text.replace(sentence, edited), RESULTS, page))
    value = "It is <!-- value: digits.tuned -->2.28x<!-- /value --> as fast."
    assert any("has a marker" in line for line in pages.problems(value, RESULTS, ROOT / "docs" / "choosing.md"))


def sentences_on(page: Path) -> list[str]:
    return sentences_of(page.relative_to(ROOT).as_posix(), RESULTS)


@pytest.mark.parametrize("where, error", [({"arm": "nobody"}, KeyError), ({}, ValueError)])
def test_a_number_is_of_one_row(where: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        Number(result="gpu-h100", table="arms", where=where, value="speedup").of(RESULTS)


def test_every_sentence_is_of_a_page() -> None:
    known = {page.relative_to(ROOT).as_posix() for page in pages.pages()}
    assert {entry["page"] for entry in read_yaml(SENTENCES)} <= known


def test_a_figure_that_is_edited_by_hand_or_of_other_values_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in drawing.FIGURES.glob("*.svg"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(drawing, "FIGURES", tmp_path)
    edited = tmp_path / "dimensions-dark.svg"
    edited.write_text(edited.read_text().replace("</text>", "9</text>", 1))
    assert [line.split()[0] for line in drawing.wrong_pictures(RESULTS)] == ["docs/figures/dimensions-dark.svg"]
    arms = RESULTS["dimensions-digits"].values["arms"]
    other = RESULTS["dimensions-digits"].model_copy(
        update={"values": {"arms": [{**arms[0], "measured": 2.0}, *arms[1:]]}}
    )
    assert len(drawing.wrong_pictures({**RESULTS, "dimensions-digits": other})) == 2


@pytest.mark.parametrize("name", list(RESULTS))
def test_values_are_those_of_the_samples(name: str) -> None:
    result = RESULTS[name]
    assert result.name == name and (result.samples or result.source != "measured")
    found = derived(result)
    if found is not None:
        assert json.loads(json.dumps(found)) == _close_to(result.values)


def _close_to(value: object) -> object:
    """The value, with tolerance for numbers: bootstraps differ in the last digits between versions of scipy."""
    if isinstance(value, dict):
        return {key: _close_to(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_close_to(part) for part in value]
    return pytest.approx(value, rel=2e-3) if isinstance(value, float) else value


def test_a_speedup_is_of_the_prompts_that_both_arms_decoded() -> None:
    rows = [("ar", "a", 100.0), ("ar", "b", 300.0), ("ar", "c", 1.0), ("tuned", "a", 50.0), ("tuned", "b", 150.0)]
    runs = [{"arm": arm, "prompt": prompt, "task": "t", "tokens": 10, "decode_ms": ms} for arm, prompt, ms in rows]
    row = searches.speedup_row(runs, "tuned", "ar", searches.ALL)
    assert row is not None and (row["speedup"], row["low"], row["high"], row["prompts"]) == (2.0, 2.0, 2.0, 2)
    assert searches.speedup_row(runs, "tuned", None, "t") is None
    assert searches.speedup_row(runs, "tuned", "ar", "another task") is None


def test_a_set_that_is_there_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is run, and a set transcribed from the diary counts as missing."""
    monkeypatch.setattr(measure, "run", lambda *_: pytest.fail("something was run"))
    monkeypatch.setattr(measure, "WORK", tmp_path)
    done = CliRunner().invoke(measure.main, ["steps-digits"])
    assert done.exit_code == 0 and "skipped; --again" in done.output, done.output
    assert RESULTS["dimensions-digits"].source == "diary"
    with pytest.raises(pytest.fail.Exception):
        CliRunner().invoke(measure.main, ["dimensions-digits"], catch_exceptions=False)
    done = CliRunner().invoke(measure.main, ["peers-digits", "--again"])
    assert done.exit_code == 1 and "first run python -m benchmarks.measure default-search-digits" in done.output


def test_an_interrupted_set_continues_with_the_command_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = [("autotune", "--version"), ("autotune", "run", str(tmp_path / "missing.json"))]
    known = measure.MeasuredSet(lambda folder, ran: measure.Collected({"ran": ran}), dict, commands)
    for name, value in (("WORK", tmp_path), ("RESULTS", tmp_path), ("SETS", {"versions": known})):
        monkeypatch.setattr(measure, name, value)
    with pytest.raises(click.ClickException, match=r"run \S+missing.json ended with 2"):
        measure.measure("versions", (), again=False)
    commands[1] = ("autotune", "run")
    measure.measure("versions", ("--help",), again=False)
    result = Result.load(tmp_path / "versions.json")
    assert result.command == "autotune run --help" and result.minutes is not None
    ran = [row["command"] for row in result.values["ran"]]
    assert ran == [["autotune", "--version"], ["autotune", "run", "--help"]]


def test_acceptance_is_that_of_the_drafts_present_weights() -> None:
    for row in RESULTS["acceptance"].values["drafts"]:
        path = ROOT / "drafts" / row["pair"] / row["draft"] / "acceptance.jsonl"
        assert acceptance_rows(path) == [row]
