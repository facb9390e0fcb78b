"""Pages whose figures, tables and numbers stand between markers, and are written from results::

<!-- table: by-task -->      ...  <!-- /table -->
<!-- figure: speedups -->    ...  <!-- /figure -->
<!-- value: digits.tuned -->...<!-- /value -->
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from benchmarks.evidence.drawing import PICTURES, SCHEMES, Results, files_of
from benchmarks.evidence.result import ROOT
from benchmarks.evidence.tables import NOT_YET, TABLES, single_values

MARKED = re.compile(r"<!-- (table|figure|value): ([\w./-]+) -->(.*?)<!-- /\1 -->", re.S)
SPEEDUP = re.compile(r"\b\d+\.\d+ ?x\b")
UNMEASURED = {"quickstart-gpu.md", "CHANGELOG.md", "engines.md"}
"""Pages whose speedups are expectations that say so, of the past, or of a transcript."""


def pages() -> list[Path]:
    """README and documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def updated(text: str, results: Results, page: Path) -> str:
    """The text of a page with what the results give between its markers.

    Raises:
        KeyError: a marker names no table, figure or value.
    """
    values = single_values(results)

    def content(match: re.Match[str]) -> str:
        kind, name, _ = match.groups()
        if kind == "value":
            inside = values[name]
        elif kind == "table":
            inside = f"\n\n{TABLES[name](results)}\n\n"
        else:
            inside = f"\n\n{_figure(name, results, page)}\n\n"
        return f"<!-- {kind}: {name} -->{inside}<!-- /{kind} -->"

    return MARKED.sub(content, text)


def _figure(name: str, results: Results, page: Path) -> str:
    """Markup that shows the light or the dark file: by the reader's system in the README, by the site's switch on its
    pages.
    """
    files = files_of(name, results)
    shown = []
    for file, inputs in files.items():
        text = html.escape(PICTURES[name].description(inputs), quote=True).replace("[", "(").replace("]", ")")
        if page.parent == ROOT:
            dark, light = (f"docs/figures/{file}-{scheme}.svg" for scheme in ("dark", "light"))
            source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            shown.append(f'<picture>{source}<img alt="{text}" src="{light}"></picture>')
        else:
            shown += [f"![{text}](figures/{file}-{scheme}.svg#only-{scheme})" for scheme in SCHEMES]
    return "\n".join(shown) or NOT_YET


def problems(text: str, results: Results, page: Path) -> list[str]:
    """What is wrong on a page: content between markers that the results do not give, and speedups outside of
    markers.
    """
    found = []
    try:
        given = updated(text, results, page)
    except KeyError as error:
        return [f"{page.name}: no table, figure or value {error}"]
    for old, new in zip(MARKED.finditer(text), MARKED.finditer(given), strict=True):
        if old[0] != new[0]:
            found.append(f"{page.name}: {old[1]} {old[2]} is not what the results give; run make figures")
    found += [
        f"{page.name}: a line begins with the marker {match[1]}, which would end the paragraph; move it behind a word"
        for match in re.finditer(r"^ *(<!-- value: [\w./-]+ -->)", text, re.M)
    ]
    if page.name not in UNMEASURED:
        found += [
            f"{page.name}: {match[0]} stands outside of markers; take it from a result"
            for match in SPEEDUP.finditer(MARKED.sub("", text))
        ]
    return found
