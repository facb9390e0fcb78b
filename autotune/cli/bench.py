"""``autotune bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.errors import UserError
from autotune.search.settings import SearchSettings


@click.command(cls=Verb, short_help="Compare a profile with other ways to decode.")
@click.argument("profile", type=click.Path(path_type=Path))
@options.prompt_options
@click.option(
    "--arms",
    default=None,
    show_default="plain decoding, Hugging Face, prompt lookup and one published default a paper, where they can run",
    help="Arms, separated by commas: ar, hf, hf-assisted, prompt_lookup, or the name of a published configuration.",
)
@click.option(
    "--draft",
    default=None,
    show_default="the profile's",
    help="Draft of the published configurations, such as retrieval.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, hidden=True, help="Random seed of the order of the runs."
)
@options.device
@options.profile_dtype
@options.settings_options(SearchSettings, "wait_until_idle_s")
@options.table("a row for every run")
@options.engine_command
@options.requests_at_once
@options.as_json
def command(profile: Path, arms: str | None, table: Path | None, as_json: bool, **choices: Any) -> None:
    """Measure a profile side by side with plain decoding and other configurations, interleaved in one run."""
    from autotune.cli.preflight import evaluation_prompts, is_engine_profile
    from autotune.study.outputs import require_replaceable

    if table is not None:
        require_replaceable(table, "--table", key="")
    of_engines = {name: choices.pop(name) for name in ("engine_command", "requests_at_once")}
    prompts, choices = evaluation_prompts(profile, choices)
    if is_engine_profile(profile):
        from autotune.console import Console
        from autotune.engines.engine_use import bench_engine

        measured = bench_engine(profile, prompts.load().first_turns(), Console(), **of_engines)
        if as_json:
            options.print_json(measured)
        return
    if any(of_engines.values()):
        raise UserError("--engine-command and --requests-at-once are of engine profiles; leave them out")

    from autotune.evaluation.bench_settings import BenchSettings

    given = None if arms is None else tuple(name.strip() for name in arms.split(",") if name.strip())
    settings = BenchSettings(prompts, given, **choices)
    click.echo(f"measuring {profile}", err=True)

    from autotune.console import Console
    from autotune.documents.decoded import runs_dataframe
    from autotune.evaluation.bench import run_bench
    from autotune.files import write_table

    result = run_bench(profile, settings, Console())
    if table is not None:
        write_table(table, runs_dataframe(result["runs"]))
    if as_json:
        options.print_json(result)
