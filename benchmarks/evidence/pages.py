"""Pages whose figures, tables and numbers stand between markers, and are written from results::

<!-- table: by-task -->      ...  <!-- /table -->
<!-- figure: speedups -->    ...  <!-- /figure -->
<!-- value: digits.tuned -->...<!-- /value -->
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

from benchmarks.evidence.drawing import PICTURES, SCHEMES, Results
from benchmarks.evidence.result import ROOT
from benchmarks.evidence.tables import NOT_YET, TABLES, single_values

MARKED = re.compile(r"<!-- (table|figure|value): ([\w./-]+) -->(.*?)<!-- /\1 -->", re.S)
SPEEDUP = re.compile(r"\b\d+\.\d+ ?x\b")
UNMEASURED = {"quickstart-gpu.md", "CHANGELOG.md"}
"""Pages whose speedups are expectations that say so, or of the past."""


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
    """Markup that shows the light or the dark file: by the reader's system in the README, by the site's switch on its pages."""
    picture = PICTURES[name]
    if not picture.inputs(results):
        return NOT_YET
    described = html.escape(picture.description(results), quote=True).replace("[", "(").replace("]", ")")
    files = {scheme: f"{name}-{scheme}.svg" for scheme in SCHEMES}
    if page.parent == ROOT:
        folder = os.path.relpath(ROOT / "docs" / "figures", page.parent)
        source = f'<source media="(prefers-color-scheme: dark)" srcset="{folder}/{files["dark"]}">'
        return f'<picture>{source}<img alt="{described}" src="{folder}/{files["light"]}"></picture>'
    return "\n".join(f"![{described}](figures/{file}#only-{scheme})" for scheme, file in files.items())


def problems(text: str, results: Results, page: Path) -> list[str]:
    """What is wrong on a page: content between markers that the results do not give, and speedups outside of markers."""
    found = []
    try:
        given = updated(text, results, page)
    except KeyError as error:
        return [f"{page.name}: no table, figure or value {error}"]
    for old, new in zip(MARKED.finditer(text), MARKED.finditer(given), strict=True):
        if old[0] != new[0]:
            found.append(f"{page.name}: {old[1]} {old[2]} is not what the results give; run make figures")
    if page.name not in UNMEASURED:
        found += [
            f"{page.name}: {match[0]} stands outside of markers; take it from a result"
            for match in SPEEDUP.finditer(MARKED.sub("", text))
        ]
    return found
