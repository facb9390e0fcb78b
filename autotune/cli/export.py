"""``autotune export``."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli import options
from autotune.cli.verb import Verb

FORMATS = ("command", "vllm-yaml", "llama-ini", "generation-config", "sglang-json", "sglang-by-load", "k8s")
"""The names in ``engines.formats.FORMATS``, whose import takes longer."""


@click.command(cls=Verb, short_help="Print the command, or write the file, that serves a profile.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--as",
    "form",
    type=click.Choice(FORMATS),
    default="command",
    show_default=True,
    help="What is written: the command, or a file of vLLM, llama.cpp, transformers' generate, SGLang or Kubernetes.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=1, max=1024),
    default=None,
    help="Length of the chain.  [default: that of the profile's chain]",
)
@click.option(
    "--models",
    type=click.Path(path_type=Path),
    default=Path("exports/vllm"),
    show_default=True,
    help="Folder for models that vLLM does not load as they are.",
)
@options.output(None, "File to write.  [default: standard output]")
def command(profile: Path, form: str, draft_tokens: int | None, models: Path, output: Path | None) -> None:
    """Print the command that starts an engine with a profile: the engine of the profile, or vLLM with the draft and the
    chain of a profile of this runtime. Models that vLLM does not load as they are get written. ``--as`` writes a file
    that an engine reads in place of the command.
    """
    from autotune.cli.preflight import require_profile

    document = require_profile(profile)

    from autotune.console import Console
    from autotune.engines.formats import Export, exported_text
    from autotune.files import write_bytes
    from autotune.study.outputs import require_replaceable

    if output is not None:
        require_replaceable(output, "-o")
    text = exported_text(form, Export(document, Console(), draft_tokens, models))
    if output is None:
        click.echo(text, nl=False)
    else:
        write_bytes(output, text.encode())
        click.echo(output)
