"""``autotune search``."""

from __future__ import annotations

from typing import Any

import click

from autotune.cli import options
from autotune.option_fields import make_settings
from autotune.search.settings import SearchSettings


@click.command(short_help="Find the fastest draft and token tree; write a profile.")
@options.settings_options(SearchSettings)
@options.as_json
def command(as_json: bool, **values: Any) -> None:
    """Measure costs, record traces, search trees by replay, measure the finalists, and write a decoding profile.

    An interrupted search is continued by the same command.
    """
    from autotune.cli.preflight import require_workload
    from autotune.search.settings import check_settings

    settings = make_settings(SearchSettings, values)
    check_settings(settings)
    require_workload(settings.workload, settings.workload_format)

    from autotune.console import Console
    from autotune.search.pipeline import search

    document = search(settings, Console())
    if as_json:
        click.echo(document.dump())
