"""``autotune export``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from autotune.cli import options
from autotune.cli.verb import Verb


@click.command(cls=Verb, short_help="Print the command that serves a profile.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=1, max=1024),
    default=None,
    help="Length of the chain.  [default: that of the profile's chain]",
)
@options.output("exports/vllm", "Folder for models that vLLM does not load as they are.")
def command(profile: Path, draft_tokens: int | None, output: Path) -> None:
    """Print the command that starts an engine with a profile: the engine of the profile, or vLLM with the draft and the
    chain of a profile of this runtime. Models that vLLM does not load as they are get written.
    """
    from autotune.cli.preflight import require_profile

    document = require_profile(profile)
    if document.point.deployment is not None:
        words = document.point.deployment.command
    else:
        from autotune.console import Console
        from autotune.engines.runtime_export import vllm_command

        words = vllm_command(document, Console(), draft_tokens=draft_tokens, output=output)
    click.echo(shlex.join(words))
