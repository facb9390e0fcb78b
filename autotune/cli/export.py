"""``autotune export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb


@click.command(cls=Verb, short_help="Print the command that serves a profile in vLLM.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=1, max=1024),
    default=None,
    help="Length of the chain.  [default: that of the profile's chain]",
)
@options.output("exports/vllm", "Folder for models that vLLM does not load as they are.")
def command(profile: Path, **choices: Any) -> None:
    """Print the command that starts vLLM with the draft and the chain of a profile, and write the models that vLLM does
    not load as they are.
    """
    from autotune.cli.preflight import require_profile

    require_profile(profile)

    from autotune.console import Console
    from autotune.engines.vllm_export import export_profile

    click.echo(export_profile(profile, console=Console(), **choices))
