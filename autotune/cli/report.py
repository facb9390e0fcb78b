"""``autotune report``."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli import options
from autotune.cli.verb import Verb


@click.command(cls=Verb, short_help="Write an HTML page that explains a profile.")
@click.argument("source", metavar="PROFILE|STUDY", type=click.Path(path_type=Path))
@options.output(None, "Page to write.  [default: report.html, and report-2.html for profile-2.json]")
@click.option(
    "--study",
    default=None,
    help="Study of the profile: the name of its folder in .autotune/, or a path, which has a slash.  [default: found next to the profile]",
)
@click.option("--storage", default=None, help="Database of the study, if workers shared one.")
@click.option("--workload", default=None, help="Workload file of the search, if it was moved.")
def command(source: Path, output: Path | None, **choices: str | None) -> None:
    """Write a page that explains a profile: one HTML file that opens offline."""
    from autotune.cli.preflight import require_profile
    from autotune.console import Console
    from autotune.report.page import write_report

    if not source.is_dir():
        require_profile(source)
    name = source.stem.replace("profile", "report") if source.suffix == ".json" else "report"
    output = output or Path(f"{name}.html")
    write_report(source, output, Console(), **choices)
    click.echo(output)
