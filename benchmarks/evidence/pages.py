"""Pages whose figures and tables stand between markers, and are written from results::

<!-- table: by-task -->      ...  <!-- /table -->
<!-- figure: speedups -->    ...  <!-- /figure -->

A number in a sentence has no marker: ``sentences.yaml`` has the sentence.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from benchmarks.evidence.drawing import PICTURES, SCHEMES, Results, files_of
from benchmarks.evidence.result import ROOT
from benchmarks.evidence.sentences import sentences_of
from benchmarks.evidence.tables import NOT_YET, TABLES

MARKED = re.compile(r"<!-- (table|figure): ([\w./-]+) -->(.*?)<!-- /\1 -->", re.S)
TRANSCRIPT = re.compile(r"^```.*?^```", re.S | re.M)
SPEEDUP = re.compile(r"\b\d+\.\d+ ?x\b")
UNMEASURED = {"quickstart-gpu.md", "RESULTS.md"}
"""Pages whose speedups are expectations that say so, or a log of measurements."""


def pages() -> list[Path]:
    """README, documentation, and the diary of measurements."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]


def updated(text: str, results: Results) -> str:
    """The text of a page with what the results give between its markers.

    Raises:
        KeyError: a marker names no table or figure.
    """

    def content(match: re.Match[str]) -> str:
        kind, name, _ = match.groups()
        inside = TABLES[name](results) if kind == "table" else _figure(name, results)
        return f"<!-- {kind}: {name} -->\n\n{inside}\n\n<!-- /{kind} -->"

    return MARKED.sub(content, text)


def _figure(name: str, results: Results) -> str:
    """Markup that shows the light or the dark file, by the site's switch."""
    shown = []
    for file, inputs in files_of(name, results).items():
        text = html.escape(PICTURES[name].description(inputs), quote=True).replace("[", "(").replace("]", ")")
        shown += [f"![{text}](figures/{file}-{scheme}.svg#only-{scheme})" for scheme in SCHEMES]
    return "\n".join(shown) or NOT_YET


def problems(text: str, results: Results, page: Path) -> list[str]:
    """Faults of a page: content between markers that the results do not give, sentences of ``sentences.yaml``
    that are missing or have other numbers, and speedups that stand elsewhere. Code blocks may show any speedup.
    """
    found = []
    try:
        given = updated(text, results)
    except KeyError as error:
        return [f"{page.name}: no table or figure {error}"]
    for old, new in zip(MARKED.finditer(text), MARKED.finditer(given), strict=True):
        if old[0] != new[0]:
            found.append(f"{page.name}: {old[1]} {old[2]} is not what the results give; run make figures")
    if "<!-- value" in text:
        found.append(f"{page.name}: a sentence has a marker; put the sentence into sentences.yaml instead")
    prose = " ".join(TRANSCRIPT.sub("", MARKED.sub("", text)).split())
    for sentence in sentences_of(page.relative_to(ROOT).as_posix(), results):
        if sentence not in prose:
            found.append(f"{page.name}: the results give this sentence of sentences.yaml: {sentence}")
        prose = prose.replace(sentence, "")
    if page.name not in UNMEASURED:
        found += [
            f"{page.name}: {match[0]} stands outside of markers; point to a table, or add the sentence to sentences.yaml"
            for match in SPEEDUP.finditer(prose)
        ]
    return found
