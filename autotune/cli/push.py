"""``autotune push``."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.verb import Verb


@click.command(cls=Verb, short_help="Upload a profile to the Hugging Face Hub.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.argument("name", metavar="OWNER/NAME")
@click.option("--private", "is_private", is_flag=True, help="Make the repository private, if it is new.")
@click.option("--license", default="apache-2.0", show_default=True, help="License of the repository, for its card.")
def command(profile: Path, name: str, is_private: bool, license: str) -> None:
    """Upload a profile to the Hugging Face Hub, with a card, and with a draft whose folder lies beside it. Other verbs
    then take OWNER/NAME in place of the profile's file. The token is HF_TOKEN, or that of hf auth login.
    """
    from autotune.modeling.hub import profile_file, push
    from autotune.report.shared import shared_files

    click.echo(push(name, shared_files(profile_file(profile), name, license), is_private=is_private))
