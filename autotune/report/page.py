"""``autotune report``: one HTML page that explains a decoding profile by the documents of its search. It opens offline:
style, plots and images are inline, and there is no script.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.console import Console, percent
from autotune.files import write_bytes
from autotune.report.content import Content
from autotune.report.plots import all_plots
from autotune.report.points import heads_label
from autotune.report.sources import find_sources
from autotune.study.outputs import require_replaceable

FOLDER = Path(__file__).parent
CONSTANTS = {
    "FEW_PROMPTS": 8,  # a bootstrap interval from fewer prompts says little about others
    "TOKEN_COUNTS": (1, 4, 8, 16, 32, 64),
}


def _or_dash(format: Callable[..., str]) -> Callable[..., str]:
    """The format, with a dash for a missing value."""
    return lambda value, *options: "-" if value is None else format(value, *options)


FILTERS: dict[str, Callable[..., Any]] = {
    "times": _or_dash("{:.2f}x".format),
    "interval": _or_dash(lambda ends: f"{ends[0]:.2f} to {ends[1]:.2f}"),
    "number": _or_dash(lambda value, digits=2: f"{value:,.{digits}f}"),
    "percent": percent,
    "signed": _or_dash(lambda share: f"{100 * share:+.1f} %"),
    "minute": lambda created: f"{datetime.datetime.fromisoformat(created):%Y-%m-%d %H:%M %Z}",
    "heads": heads_label,
    "median": statistics.median,
}


def write_report(
    given: Path,
    output: Path,
    console: Console,
    *,
    study: str | None = None,
    storage: str | None = None,
    workload: str | None = None,
) -> None:
    require_replaceable(output, "-o")
    sources = find_sources(given, study=study, storage=storage)
    if sources.folder not in (None, given):
        console.say(f"{given}: study in {sources.folder}")
    elif sources.folder is None and not sources.is_of_engine:
        console.say(
            f"{given}: no study found next to it; the page shows the profile alone (give the study with --study)"
        )
    page = render(Content(sources, workload=workload)).encode()
    write_bytes(output, page)
    console.say(f"report written to {output} ({len(page) / 1e6:.1f} MB)")


def render(content: Content) -> str:
    """The page as HTML. Names and texts of models, prompts and devices are untrusted: all of them are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    drawn = all_plots(content)
    if content.example is not None and content.example.svg:
        drawn["tree"] = content.example.svg
    plots = {name: Markup(svg) for name, svg in drawn.items()}  # our own SVG, whose texts are escaped
    templates = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    templates.trim_blocks = templates.lstrip_blocks = True
    templates.filters |= FILTERS
    return templates.get_template("page.html").render(vars(content) | CONSTANTS | {"plots": plots})
