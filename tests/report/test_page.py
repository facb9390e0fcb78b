"""The page: complete, escaped, offline, with the cells of the documents' tables."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.report.page import render, sections_of
from autotune.report.sources import Sources, find_sources
from autotune.report.tables import decoding_table, provenance_tables
from tests.engine_profiles import LOADS, engine_profile
from tests.report.conftest import EVIL, QUESTION, MadeStudy
from tests.sample_documents import decoding_profile

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
OF_STUDY = {"predictions", "fronts", "ablation", "acceptance", "trees", "costs", "subnets"}
SECTIONS = {"profile", "evaluation", "provenance"} | OF_STUDY
VOID = {"meta", "img", "link", "br", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page; asserts that tags match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.missing: list[str] = []
        self.texts: list[str] = []
        self.headings: list[int] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        known = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in known.items()]
        self.ids += [known["id"]] if "id" in known else []
        if known.get("class") == "missing":
            self.missing.append("")
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self.open} and self.tables:
            self.tables[-1][-1][-1] += data
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))


@pytest.fixture(scope="module")
def text(sources: Sources) -> str:
    return render(sources)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_every_section_has_content(page: Page) -> None:
    assert {*page.ids} >= SECTIONS and len(page.ids) == len({*page.ids}), "ids are unique"
    assert page.missing == []
    assert page.headings[0] == 1 and all(b - a <= 1 for a, b in zip(page.headings, page.headings[1:], strict=False))
    links = {value[1:] for tag, name, value in page.attributes if tag == "a" and name == "href"}
    assert SECTIONS <= links <= {*page.ids}
    assert all(value.strip() for _, name, value in page.attributes if name == "aria-label")


def test_every_table_of_the_documents_is_shown(page: Page, sources: Sources, made: MadeStudy) -> None:
    sections = [table for section in sections_of(sources, None) for table in section.tables]
    expected = [decoding_table(made.profile), *sections, *provenance_tables(sources)]
    assert len(page.tables) == len(expected) > 12
    for shown, table in zip(page.tables, expected, strict=True):
        assert shown == [list(table.columns)] * any(table.columns) + [list(row) for row in table.rows], table.title
    assert "1,234 configurations over 4 recorded prompts" in page.text
    assert "Measured on 2 prompts only" in page.text and "finalist 1: " in page.text
    for sha256 in (made.profile.target.sha256, EVIL.sha256, made.profile.workload.tune_sha256):
        assert sha256 in page.text


def test_page_loads_nothing_and_runs_nothing(text: str, page: Page) -> None:
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:80])
    assert not {"script", "iframe", "object", "embed", "link"} & {tag for tag, _, _ in page.attributes}
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_untrusted_names_and_texts_are_escaped(text: str, page: Page) -> None:
    """The draft's name and the prompt contain a script."""
    assert "<script" not in text.lower()
    assert EVIL.id in page.text and QUESTION in page.text
    assert "--draft '<evil>'" in page.text


def test_page_of_a_profile_alone_says_what_is_missing(made: MadeStudy, tmp_path: Path) -> None:
    made.profile.save(tmp_path / "p.json")
    page = Page(render(find_sources(tmp_path / "p.json")))
    assert {*page.ids} >= SECTIONS and len(page.missing) == len(OF_STUDY)
    assert page.text.count("No study was found next to the profile") == len(page.missing)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ({}, "2.00x, by replay of the tuning prompts"),
        ({"visual_keep": 0.5}, "keep=0.5"),
        ({"draft": None}, "none: no draft was faster on this device"),
    ],
)
def test_page_of_a_profile_without_measurements(profile: dict[str, Any], expected: str, tmp_path: Path) -> None:
    decoding_profile(**profile).save(tmp_path / "p.json")
    page = Page(render(find_sources(tmp_path / "p.json")))
    assert expected in page.text and "Nothing was measured" in page.text


def test_page_of_a_study_without_a_profile(made: MadeStudy, tmp_path: Path) -> None:
    folder = tmp_path / ".autotune" / "s"
    shutil.copytree(made.folder, folder)
    (folder / "profile.json").unlink()
    page = Page(render(find_sources(folder)))
    assert "search has not finished. The same command resumes it" in page.text and "Pareto front" in page.text


def test_the_page_of_an_engine_profile_has_its_sections(tmp_path: Path) -> None:
    """Loads, settings and prices in place of a study's sections; the folder of its search gives the same page."""
    engine_profile().save(tmp_path / "profile.json")
    text = render(find_sources(tmp_path / "profile.json"))
    page = Page(text)
    of_engine = {"loads", "settings"}
    assert {"profile", "evaluation", "provenance"} | of_engine == {*page.ids} & (SECTIONS | of_engine)
    assert page.missing == [""] and "the search was not given --load." in page.text and "<does>" not in text
    assert render(find_sources(tmp_path)).partition("<footer>")[0] == text.partition("<footer>")[0]


def test_throughput_is_plotted_against_time_per_token(tmp_path: Path) -> None:
    """A point for each load and setting, within the axes, which begin at 0: the highest throughput is at the top."""
    profile = engine_profile()
    assert profile.evidence.engine is not None
    engine = profile.evidence.engine.model_copy(update={"loads": LOADS})
    evidence = profile.evidence.model_copy(update={"engine": engine})
    page = Page(render(Sources(profile=profile.model_copy(update={"evidence": evidence}))))
    found = {name: [float(value) for _, known, value in page.attributes if known == name] for name in ("cx", "cy")}
    assert page.missing == [] and sorted(found["cy"]) == pytest.approx([0.0] + 3 * [320 - 320 * 40 / 60], abs=0.1)
    assert found["cx"] == 4 * [560.0]
    assert "16 requests at once, off" in page.text


def test_command_line_writes_the_page_which_differs_in_its_time_alone(
    made: MadeStudy, tmp_path: Path, text: str
) -> None:
    output = tmp_path / "sub" / "report.html"
    done = CliRunner().invoke(main, ["report", str(made.profile_path), "-o", str(output)])
    assert done.exit_code == 0 and done.stdout == f"{output}\n"
    assert output.read_text().split("<footer>")[0] == text.split("<footer>")[0]


@pytest.mark.parametrize(
    ("source", "page"),
    [
        ("profile.json", "report.html"),
        ("profile-h100.json", "report-h100.html"),
        ("p/profile-2.json", "report-2.html"),
        ("x.json", "x.html"),
    ],
)
def test_the_page_of_another_profile_is_another_file(source: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.cli.preflight.require_profile", lambda path: None)
    monkeypatch.setattr("autotune.report.page.write_report", lambda source, output, console, **options: None)
    assert CliRunner().invoke(main, ["report", source]).stdout == f"{page}\n"
