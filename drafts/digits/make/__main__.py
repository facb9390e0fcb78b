"""``python -m drafts.digits.make target | independent | examples``, from the root of the repository."""

from __future__ import annotations

from pathlib import Path

import click

from drafts.digits.make.examples import write_examples
from drafts.digits.make.models import INDEPENDENT, TARGET, make

PAIR = Path(__file__).parents[1]


@click.group()
def main() -> None:
    """Make the pair `digits` again."""


@main.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=PAIR / "target")
def target(output: Path) -> None:
    """Train the target."""
    make(TARGET, output)


@main.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=PAIR / "independent")
def independent(output: Path) -> None:
    """Distil the independent draft from the target."""
    make(INDEPENDENT, output, teacher=PAIR / "target")


@main.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path(".autotune/digits"), show_default=True)
@click.option("--train", default=13_600, show_default=True, help="Number of examples to train on.")
@click.option("--held-out", default=240, show_default=True, help="Number of held-out examples.")
def examples(output: Path, train: int, held_out: int) -> None:
    """Write the file of answered prompts that the recipes of the other drafts name."""
    click.echo(f"{write_examples(output, train, held_out)} written")


if __name__ == "__main__":
    main()
