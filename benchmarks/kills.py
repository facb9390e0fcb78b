"""Kills search, check, train and serve of a tiny pair at random moments, then lets them end, and counts what they kept.

Takes about 5 minutes.

    python benchmarks/kills.py [VERB ...] [--kills 10]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

VERBS = ("search", "check", "train", "serve")


@click.command()
@click.argument("verbs", nargs=-1, type=click.Choice(VERBS))
@click.option("--kills", default=10, show_default=True, help="Of each verb.")
def main(verbs: tuple[str, ...], kills: int) -> None:
    from tests.cli.kills import kill, kill_servers, small_commands
    from tests.tiny_models import vision_pair

    with tempfile.TemporaryDirectory() as root:
        pair = vision_pair(Path(root) / "pair")
        for verb in verbs or VERBS:
            folder = Path(root) / verb
            folder.mkdir()
            command = small_commands(pair, folder)[verb]
            kept = kill_servers(command, folder, kills) if verb == "serve" else kill(verb, command, folder, kills)
            click.echo(kept)


if __name__ == "__main__":
    main()
