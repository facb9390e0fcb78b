"""``autotune report``."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli import options
from autotune.cli.verb import Verb


@click.command(cls=Verb, short_help="Write an HTML page that explains a profile.")
@click.argument("source", metavar="PROFILE|STUDY", type=click.Path(path_type=Path))
@options.output(None, "Page to write; default: report.html, and report-CARD.html of profile-CARD.json.")
@click.option(
    "--study",
    default=None,
    help="Study of the profile: the name of its folder in .autotune/, or a path, which has a slash.  [default: found next to the profile]",
)
@click.option("--storage", default=None, help="Database of the study, if workers shared one.")
@click.option("--workload", default=None, help="Workload file of the search, if it was moved.")
def command(source: Path, output: Path | None, study: str | None, storage: str | None, workload: str | None) -> None:
    """Write a page that explains a profile: one HTML file that opens offline."""
    from autotune.cli.preflight import is_engine_profile
    from autotune.console import Console
    from autotune.report.page import write_engine_report, write_report
    from autotune.study.document import newest_profile

    output = output or Path(
        f"report{source.stem.removeprefix('profile') if source.stem.startswith('profile') else ''}.html"
    )
    profile = newest_profile(source) if source.is_dir() else source
    if profile is not None and profile.is_file() and profile.suffix == ".json" and is_engine_profile(profile):
        write_engine_report(profile, output, Console())
    else:
        write_report(source, output, Console(), study=study, storage=storage, workload=workload)
    click.echo(output)
