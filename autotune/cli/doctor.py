"""``autotune doctor``."""

from __future__ import annotations

import sys
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.study.search_settings import SearchSettings, require_known


@click.command(cls=Verb, short_help="Tell what to expect on this machine before a search.")
@click.option(
    "--target", "--model", default=None, help="Target to examine, as of a search; default: the machine alone."
)
@options.settings_options(SearchSettings, "dtype")
@options.workload
@options.workload_format
@options.device
@options.random_weights
@click.option(
    "--gpu", default=None, help="Card of another machine: tell by its config how many of them the target needs."
)
@click.option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(min=2, max=1024),
    default=48,
    show_default=True,
    help="Tokens of each of four answers, at which a verification is compared with single steps.",
)
@options.as_json
def command(target: str | None, workload: str | None, as_json: bool, **choices: Any) -> None:
    """Tell what to expect on this machine before a search, in a minute: its devices and their datasheets, the bandwidth
    that a copy reaches, and other processes. With a target also: the attention kernels that torch picks for its shapes,
    whether verification equals single steps, what verifications cost in plain steps, and on a GPU time and memory of
    capturing.

    Exits with 1 if torch cannot use the machine's GPU, or if a verification differs from single steps, or captured
    steps from eager ones, by more than rounding explains.
    """
    from autotune.cli.preflight import require_workload
    from autotune.modeling.loading import DEFAULT_PAIR, resolve
    from autotune.modeling.target_defaults import default_workload

    if (gpu := choices["gpu"]) is not None:
        require_known(gpu)
    click.echo(f"examining this machine{f' and {target}' if target else ''}", err=True)
    if target is not None:
        resolve(target, weights=not (choices["random_weights"] or gpu))
    workload = workload or (default_workload(target) if target else DEFAULT_PAIR)
    require_workload(workload, choices["workload_format"])

    from autotune.console import Console
    from autotune.doctor.examination import examine

    console = Console()
    diagnosis = examine(target, workload, console, **choices)
    if as_json:
        click.echo(diagnosis.dump())
    else:
        for table in diagnosis.tables():
            console.show(table)
    for text in diagnosis.notes:
        console.say(f"- {text}")
    for text in diagnosis.defects:
        console.say(f"DEFECT: {text}")
    sys.exit(1 if diagnosis.defects else 0)
