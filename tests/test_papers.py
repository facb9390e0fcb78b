"""``docs/papers.md`` has a row for everything that the five papers number, and ``docs/citations.md`` an entry for every
work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml

from tests.imports import ROOT

PAPERS, CITATIONS = (ROOT / "docs" / "papers.md").read_text(), (ROOT / "docs" / "citations.md").read_text()

# Typed from the papers' text, and counted there by a search for "(n)" and \tag{n}, Table, Figure and Algorithm:
# equations, tables, figures with their parts, algorithms.
NUMBERED: dict[str, dict[str, str]] = {
    "SAGE": {"eq.": "1-39", "table": "1-6", "figure": "1-4", "algorithm": "1"},
    "WETAP": {"eq.": "1-11", "table": "1-5", "figure": "1a-c, 2-8", "algorithm": "1"},
    "STAR": {"eq.": "1-3", "table": "1-5", "figure": "1a-c, 2a-d, 3a-d, 4", "algorithm": "1"},
    "DREAM": {"eq.": "1-4", "table": "1-4", "figure": "1a-b, 2, 3a-c, 4a-d, 5a-b"},
    "SpecVLM": {"eq.": "1-3", "table": "1-7", "figure": "1a-b, 2, 3a-b, 4a-c, 5-7"},
}
STATED = {
    "SAGE": "D 3..8; W 2..10; k 10; 64 nodes; window 10; thresholds 2 and 3; 0.1 l / D; 80 %; 90 %; greedy; confidence 0.5; lemma 4.3; theorems 4.4 and 4.6 to 4.8; corollary A.2",
    "WETAP": "top-K 10; top-P 0.9; W 16..128; length 8; 64 tokens; 1.2, ; 0.6 (section 4.4; no τ; temperature 1",
    "STAR": "{0.25, 0.5, 0.75, 1}; {0.1 n .. n}; 5 layers; window 6; 0.2 feature; 0.2 distillation; 3e-5; 0.9 and 0.95; at 0.5; 68,000",
    "DREAM": "depth 6; k 4; 32 tokens; 75 %; steps of 4; λ_KL 1.0; λ_feat 0.2; λ_intermed 0.2; 3e-5; 0.9 and 0.95; at 0.5; 68,000",
    "SpecVLM": "top-K 10; 60 tokens; depth 7; 0.1 CE; 1.0 SmoothL1; 20x; 3x; two queries; no warm-up; 128; 8e-5 or 5e-5; one epoch; 0.9 and 0.95; decay 0",
}
WORKS = (
    "tong2026sage wetap huang2025specvlm star2025 hu2025dream li2024eagle2 li2025eagle3 chen2024sequoia deepseekai2024deepseekv3 "
    "saxena2023prompt zhao2025frspec daliri2024coupling xu2024magpie jordan2024muon yuan2023scaling rubin1981bayesian "
    "lange1989robust akiba2019optuna xia2024unlocking shen2026mmspec abramovich2026speedbench chen2021evaluating cobbe2021training"
)


def numbers(text: str) -> Iterator[str]:
    """The numbers of "1a-c, 2 and 4 to 6", in the text's order: 1a, 1b, 1c, 2, 4, 5, 6."""
    for number, part, last in re.findall(r"(\d+)([a-d]?)(?:(?:-| to )(\d+|[a-d]))?", text):
        if last.isdigit():
            yield from map(str, range(int(number), int(last) + 1))
        elif last:
            yield from (number + letter for letter in "abcd" if part <= letter <= last)
        else:
            yield number + part


def section(paper: str) -> str:
    (found,) = re.findall(rf"^## {paper}\n(.*?)^## ", PAPERS, flags=re.M | re.S)
    return str(found)


@pytest.mark.parametrize("paper", NUMBERED)
def test_everything_that_a_paper_numbers_has_a_row(paper: str) -> None:
    rows = [line.split(" | ")[0] for line in section(paper).splitlines() if line.startswith("| ")]
    item = r"\d+[a-d]?(?:(?:-| to )(?:\d+|[a-d])(?![\w]))?"
    for kind, listed in NUMBERED[paper].items():
        lists = re.findall(rf"\b{re.escape(kind)}s? ({item}(?:(?:, | and ){item}(?!\w))*)", "\n".join(rows))
        named = {number for found in lists for number in numbers(found)}
        assert set(numbers(listed)) <= named, f"{paper}: no row for {kind} {sorted(set(numbers(listed)) - named)}"


@pytest.mark.parametrize("paper", STATED)
def test_every_default_and_theorem_of_a_paper_has_a_row(paper: str) -> None:
    assert [value for value in STATED[paper].split("; ") if value not in section(paper)] == []


def test_rows_say_what_is_measured_or_why_not() -> None:
    """A reading that is open has its effect, or says that it is not measured, in its row or in its item of the list."""
    entries = [entry for paper in NUMBERED for entry in re.split(r"\n(?=[|*])", section(paper))]
    open_ones = [entry for entry in entries if "**Open" in entry]
    effect = r"\bM\b|not measured|[Ff]igures below|below (the table|has figures)|[Ss]ee below"
    assert len(open_ones) > 15 and [entry[:60] for entry in open_ones if not re.search(effect, entry)] == []


def test_every_work_has_a_citation() -> None:
    entries = dict(re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", CITATIONS, flags=re.M | re.S))
    assert set(WORKS.split()) - entries.keys() == set()
    for key, entry in entries.items():
        assert re.search(r"^  title +=", entry, re.M) and re.search(r"^  author +=", entry, re.M), key
    folders = (ROOT / "autotune", ROOT / "docs", ROOT / "drafts")
    pages = [path.read_text() for folder in folders for path in folder.rglob("*.[mp][dy]")]
    arxiv = {number for page in pages for number in re.findall(r"arxiv[ :.\w/]*?(\d{4}\.\d{5})", page, re.I)}
    assert [number for number in sorted(arxiv) if number not in CITATIONS] == []


def test_the_citation_file_is_valid() -> None:
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= content.keys()
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version and content["version"] == version[1] and len(content["references"]) == 5
