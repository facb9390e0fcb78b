"""The page: complete, escaped, offline, with the numbers of the documents."""

from __future__ import annotations

import re
import shutil
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.documents.decoding_profile import DecodingProfile
from autotune.report.content import Content
from autotune.report.figures import Series, lines
from autotune.report.page import render
from autotune.report.sources import Sources, find_sources
from tests.engine_profiles import LOAD, backend_result, engine_profile
from tests.report.conftest import EVIL, QUESTION, MadeStudy
from tests.sample_documents import decoding_profile

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
SECTIONS = {"profile", "evaluation", "predictions", "fronts", "ablation", "acceptance", "trees"}
SECTIONS |= {"costs", "subnets", "configurations", "provenance"}
ENGINE = {"settings", "prices", "loads"}
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

    def table(self, header: str) -> list[list[str]]:
        """The rows of the table that has this column, with white space collapsed."""
        (found,) = [rows for rows in self.tables if any(header == cell.strip() for cell in rows[0])][:1]
        return [[re.sub(r"\s+", " ", cell).strip() for cell in row] for row in found]


@pytest.fixture(scope="module")
def text(sources: Sources) -> str:
    return render(Content(sources))


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_every_section_has_content(page: Page) -> None:
    assert {*page.ids} >= SECTIONS and len(page.ids) == len({*page.ids}), "ids are unique"
    assert page.missing == []
    assert page.headings[0] == 1 and all(b - a <= 1 for a, b in zip(page.headings, page.headings[1:], strict=False))
    links = {value[1:] for tag, name, value in page.attributes if tag == "a" and name == "href"}
    assert SECTIONS <= links <= {*page.ids}
    letters = {name for name in page.ids if name.startswith("configuration-")}
    assert letters == {link for link in links if link.startswith("configuration-")}, "every letter is used and listed"


def test_page_loads_nothing_and_runs_nothing(text: str, page: Page) -> None:
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:80])
    assert not {"script", "iframe", "object", "embed", "link"} & {tag for tag, _, _ in page.attributes}
    assert "default-src 'none'" in text
    outside = {*re.findall(r"https?://[^\"' )<]+", text)}
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, (
        "XML namespaces, which are not loaded"
    )
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_untrusted_names_and_texts_are_escaped(text: str, page: Page) -> None:
    """The draft's name and the prompt contain a script; tables and plots show them as text."""
    assert "<script" not in text.lower()
    assert EVIL.id in page.text and QUESTION in page.text
    assert "--draft '<evil>'" in page.text
    plots = text[text.index('id="costs"') : text.index('id="subnets"')]
    assert any("evil/&lt;script&gt;" in plot.split("</svg")[0] for plot in plots.split("<svg")[1:]), "in the legend"


def test_plots_use_the_colours_of_the_page(text: str) -> None:
    for svg in re.findall(r'<svg[^>]*class="plot".*?</svg>', text, re.S):
        assert not re.search(r"#0101\w\w", svg) and "var(--ink)" in svg
        assert not re.search(r"(?:fill|stroke): #[0-9a-f]{6}", svg), "a fixed colour would be invisible in dark mode"
        assert all("var(--" in element for element in re.findall(r"<text[^>]*>", svg)), (
            "text would be black in dark mode"
        )
    for _, name, value in Page(text).attributes:
        if name == "aria-label":
            assert value.strip()


def test_numbers_are_those_of_the_documents(text: str, page: Page, made: MadeStudy) -> None:
    rows = {row[0].split(":")[0]: row for row in page.table("arm")[1:]}
    for arm in made.profile.evidence.compared:
        predicted = "-" if arm.predicted_speedup is None else f"{arm.predicted_speedup:.2f}x"
        interval = f"{arm.ci95[0]:.2f} to {arm.ci95[1]:.2f}"
        numbers = [f"{arm.speedup:.2f}x", interval, "2.00", f"{arm.tokens_per_second:.0f}"]
        assert rows[arm.name][1:] == [predicted, *numbers]
    assert "1,234 configurations over 4 recorded prompts" in page.text
    finalists = page.table("prediction error")[1:]
    assert [row[1:] for row in finalists] == [
        ["1.90x", "1.60 to 2.20", "1.80x", "1.70 to 1.90", "+5.6 %", "8"],
        ["1.90x", "1.60 to 2.20", "1.40x", "1.20 to 1.60", "+35.7 %", "8, eliminated"],
        ["-", "-", "1.30x", "1.20 to 1.40", "-", "16"],
    ]
    assert page.table("over plain decoding") == [
        ["task", "over plain decoding", "over chain"],
        ["read", "1.90x (1.80 to 2.00)", "-"],
        ["all", "1.83x (1.73 to 1.93)", "1.23x (1.13 to 1.33)"],
    ]
    assert "2.01x as fast" in page.text and "measured were 1.87x on these and 1.83x on held-out prompts" in page.text
    rows, point = page.table("identical outputs"), made.profile.point
    assert point.measured is not None and point.predicted is not None
    assert rows[1][1] == f"{point.predicted.speedup:.2f}x"
    assert rows[2][1:] == [f"{point.measured.speedup:.2f}x", "1.55 to 2.17", "2.34", "876", "2", "2/2"]
    assert page.text.count("Measured on 2 prompts only") == 1
    grid = page.table("heads")
    assert grid == [["heads", "25 %", "50 %", "100 %"], *grid[1:]]
    speedups = {
        (one.subnet.heads or 1.0, one.subnet.injection_layer, one.subnet.visual_keep): one for one in made.screened
    }
    assert grid[1][1:] == [f"{speedups[1.0, 3, keep].speedup:.2f}" for keep in (0.25, 0.5, 1.0)]
    assert grid[2][1:] == [f"{speedups[0.5, 3, keep].speedup:.2f}" for keep in (0.25, 0.5, 1.0)]
    assert "1.71x" in text, "the full draft in the cumulative ablation"
    for sha256 in (made.profile.target.sha256, EVIL.sha256, made.profile.workload.tune_sha256):
        assert sha256 in page.text


def test_the_point_is_described_in_words(page: Page) -> None:
    draft = "(independent) drafts, with 50 % of the visual tokens."
    tree = "The tree policy is eagle2: at most 9 drafted tokens"
    assert (
        f"{draft} {tree} per round in up to 4 levels, with up to 3 expanded nodes per level. The output is lossless"
        in page.text
    )


def test_page_of_a_profile_alone_says_what_is_missing(made: MadeStudy, tmp_path: Path) -> None:
    made.profile.save(tmp_path / "p.json")
    page = Page(render(Content(find_sources(tmp_path / "p.json"))))
    assert {*page.ids} >= SECTIONS
    assert page.text.count("No study was found next to the profile") == 7 and "autotune report" in page.text
    assert [row[0].split(":")[0] for row in page.table("arm")[1:]] == ["ar", "chain", "eagle2", "tuned"]


@pytest.mark.parametrize(
    ("profile", "expected", "unexpected"),
    [
        ({}, "Predicted speedup2.00x", "visual"),
        ({"visual_keep": 0.5}, "50 % of the visual tokens", "measured on these"),
        ({"draft": None}, "The target decodes without a draft", "visual"),
    ],
)
def test_page_of_a_profile_without_measurements(
    profile: dict[str, Any], expected: str, unexpected: str, tmp_path: Path
) -> None:
    """Pages without images have no word about them."""
    decoding_profile(**profile).save(tmp_path / "p.json")
    text = Page(render(Content(find_sources(tmp_path / "p.json")))).text
    assert (expected in text and unexpected not in text and "Estimated from a" in text) or "draft" in profile


def test_profile_that_falls_back_to_plain_decoding(made: MadeStudy, tmp_path: Path) -> None:
    """If the tuned configuration is slower on held-out prompts, the profile is plain decoding, and the page shows that
    arm.
    """
    profile = DecodingProfile.load(made.profile_path)
    compared = [
        one.model_copy(update={"speedup": 0.8}) if one.name == "tuned" else one for one in profile.evidence.compared
    ]
    evidence = profile.evidence.model_copy(update={"compared": compared})
    point = profile.point.model_copy(update={"draft": None, "tree": None})
    profile.model_copy(update={"point": point, "evidence": evidence}).save(tmp_path / "p.json")
    page = Page(render(Content(find_sources(tmp_path / "p.json"))))
    assert "Measured speedup over plain decoding1.00x" in page.text and "Plain decoding is the fastest" in page.text
    assert [row[0] for row in page.table("arm")[1:] if "this profile" in row[0]] == ["ar: this profile"]


def test_page_of_a_study_without_a_profile(made: MadeStudy, tmp_path: Path) -> None:
    folder = tmp_path / ".autotune" / "s"
    shutil.copytree(made.folder, folder)
    (folder / "profile.json").unlink()
    page = Page(render(Content(find_sources(folder))))
    assert "search has not finished. The same command resumes it" in page.text
    assert "Best predicted speedup so far" in page.text


def test_command_line_writes_the_page(made: MadeStudy, tmp_path: Path) -> None:
    output = tmp_path / "sub" / "report.html"
    done = CliRunner().invoke(main, ["report", str(made.profile_path), "-o", str(output)])
    assert done.exit_code == 0 and done.stdout == f"{output}\n"
    assert output.read_text().startswith("<!DOCTYPE html>")


def test_same_documents_give_the_same_page(made: MadeStudy, text: str) -> None:
    """Only the time in the footer differs."""
    again = render(Content(find_sources(made.profile_path)))
    assert again.split("<footer>")[0] == text.split("<footer>")[0]


def test_the_page_of_an_engine_profile_has_its_sections(tmp_path: Path) -> None:
    """Settings, prices and loads in place of a study's sections; the folder of its search gives the same page."""
    path = tmp_path / "profile.json"
    engine = engine_profile().evidence.engine
    assert engine is not None
    engine_profile(engine=engine.model_copy(update={"loads": [LOAD]})).save(path)
    text = render(Content(find_sources(path)))
    page = Page(text)
    assert {"profile", "evaluation", "settings", "prices", "loads", "provenance"} == {*page.ids} & (SECTIONS | ENGINE)
    assert page.missing == [] and "<does>" not in text
    assert render(Content(find_sources(tmp_path))).partition("<footer>")[0] == text.partition("<footer>")[0]
    label = "ngram-mod(24,48,64)"
    assert f"llama.cpp serves tests/target with {label}" in page.text and "llama-server -m model.gguf" in page.text
    assert [row[:3] for row in page.table("replayed")[1:]] == [
        ["ngram-mod", "40", f"{label}, default"],
        ["ngram-simple", "12", label],
    ]
    assert "ngram-simple is left out: the build <does> not have it." in page.text
    assert page.table("wall, ms")[1:] == [["1", "64 tokens", "10.0", "9.0"], ["2", "64 tokens", "20.0", "9.0"]]
    assert page.table("at once")[1] == ["off", "4", "8", "40.0", "9, 12", "3.0, 4.0", "7 of 8"]
    assert [row[0] for row in page.table("arm")[1:]] == ["ar", "tuned: this profile"]
    engine_profile(speculation=None).save(path)
    plain = Page(render(Content(find_sources(path))))
    assert "without speculation" in plain.text and "--requests-at-once 4" in plain.text
    assert [row[0] for row in plain.table("arm")[1:]] == ["ar: this profile", "tuned"]


def test_the_page_shows_the_race_between_backends(made: MadeStudy, tmp_path: Path) -> None:
    failed = {"failure": "llama-server ended: out of memory", "precision": "Q4_1", "has_own_weights": False}
    race = [backend_result("runtime", is_deployed=True), backend_result("llama.cpp", **failed)]
    evidence = made.profile.evidence.model_copy(update={"backends": race})
    made.profile.model_copy(update={"evidence": evidence}).save(tmp_path / "p.json")
    page = Page(render(Content(find_sources(tmp_path / "p.json"))))
    own, other = page.table("agreement")[1:]
    assert own == [
        "runtime: deployed",
        "tests/target",
        "float32",
        "off",
        "3.0",
        "1.50x",
        "1.40 to 1.60",
        "3",
        "100.0 %",
    ]
    assert other == ["llama.cpp", "tests/target", "Q4_1, another model", "llama-server ended: out of memory"]


def test_wrong_options_are_refused_before_the_work(made: MadeStudy, tmp_path: Path) -> None:
    output, engine = tmp_path / "r.html", tmp_path / "engine.json"
    engine_profile().save(engine)
    cases = (
        (engine, ("-o", output, "--study", "x"), "--study: not an option for a profile of llama.cpp; leave it out"),
        (made.profile_path, ("-o", output, "--workload", "nothing.jsonl"), "nothing.jsonl: no such file"),
        (made.profile_path, ("-o", "/proc/nowhere/r.html"), "cannot be written"),
        (made.profile_path, ("-o", tmp_path), "must be a file"),
    )
    for profile, options, message in cases:
        done = CliRunner().invoke(main, ["report", str(profile), *map(str, options)])
        assert done.exit_code == 2 and message in done.stderr, message
    assert not output.exists()


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


def test_prices_of_zero_are_drawn() -> None:
    """A datasheet prices drafts without a model at nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines([Series("retrieval", [1, 2], [0.0, 0.0])], x="tokens", y="ms")
