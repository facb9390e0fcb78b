"""``autotune train``."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.modeling.loading import Dtype
from autotune.study.search_settings import SearchSettings


@click.command(cls=Verb, short_help="Train a draft from a recipe.")
@click.argument("recipe", type=click.Path(path_type=Path))
@options.output(None, "Folder to write.  [default: the folder that the recipe names]")
@options.settings_options(SearchSettings, "dtype")
def command(recipe: Path, output: Path | None, dtype: Dtype | None) -> None:
    """Train a draft from a recipe. Interrupted training continues at its last checkpoint."""
    from autotune.study.outputs import require_replaceable
    from autotune.training.recipe import require_trainable

    if output is not None and not (output / ".checkpoint").exists():
        require_replaceable(output / "model.safetensors", "-o", key="")
    require_trainable(recipe)

    from autotune.console import Console
    from autotune.training.trainer import train

    train(recipe, output=output, dtype=dtype, console=Console())
