"""``autotune diff``."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli import options
from autotune.cli.verb import Verb


@click.command(cls=Verb, short_help="Compare two profiles, and explain their difference.")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@options.as_json
def command(a: Path, b: Path, as_json: bool) -> None:
    """Compare two profiles of a target: of two searches, two versions of an engine or two machines. Prints settings
    that differ, gain, acceptance by task and times with intervals, and what explains the difference.
    """
    from autotune.cli.preflight import require_profile

    profiles = require_profile(a), require_profile(b)

    from autotune.console import Console
    from autotune.evaluation.profile_difference import difference_of

    difference, console = difference_of(*profiles, (str(a), str(b))), Console()
    for table in difference.tables():
        if table.rows:
            console.show(table)
    if as_json:
        click.echo(difference.dump())
    else:
        console.answer(difference.explanation)
