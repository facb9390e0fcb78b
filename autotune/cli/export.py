"""``autotune export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options


@click.command(short_help="Write the nearest configuration of vLLM.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--study",
    type=click.Path(path_type=Path),
    default=None,
    help="Study folder of the search.  [default: found in .autotune/ next to the profile or here]",
)
@click.option("--draft", default=None, help="Another draft that the search recorded, instead of the point's draft.")
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=1),
    default=None,
    help="Export the chain of this length instead of the fastest.",
)
@options.output(None, "Folder to write.  [default: exports/vllm]")
@options.as_json
def command(profile: Path, as_json: bool, **choices: Any) -> None:
    """Write the nearest configuration that vLLM can run, chosen by replay, and print its start command."""
    from autotune.cli.preflight import require_profile

    require_profile(profile)

    from autotune.console import Console
    from autotune.export.exporter import export_profile

    result = export_profile(profile, console=Console(), **choices)
    if as_json:
        click.echo(result.dump())
    else:
        click.echo(result.command)
