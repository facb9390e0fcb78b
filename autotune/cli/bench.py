"""``autotune bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.search.settings import SearchSettings


@click.command(cls=Verb, short_help="Compare a profile with other ways to decode.")
@click.argument("profile", type=click.Path(path_type=Path))
@options.prompt_options
@click.option(
    "--arms",
    default=None,
    show_default="plain decoding, Hugging Face, prompt lookup and one published default a paper, where they can run",
    help="Arms, separated by commas: ar, hf, hf-assisted, prompt_lookup, or the name of a published configuration; "
    "of an engine, ar, tuned, or its best default.",
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
    from autotune.cli.preflight import require_profile, workload_for
    from autotune.study.outputs import require_replaceable

    if table is not None:
        require_replaceable(table, "--table", key="")
    document = require_profile(profile)  # before numba is imported

    from autotune.evaluation.bench_settings import evaluation_prompts, require_arms

    names = None if arms is None else [name.strip() for name in arms.split(",") if name.strip()]
    require_arms(document, names or ())
    chosen = {name: choices.pop(name) for name in options.PROMPT_CHOICES}
    if chosen["chat_template_kwargs"] is None:
        chosen["chat_template_kwargs"] = document.chat_template_kwargs
    chosen["workload"] = workload_for(profile, chosen["workload"], chosen["workload_format"])
    click.echo(f"measuring {profile}", err=True)

    from autotune.cli.arms import compared_arms, measured_loads
    from autotune.console import Console
    from autotune.documents.decoded import runs_dataframe
    from autotune.evaluation.bench import run_bench
    from autotune.files import write_table

    console = Console()
    prompts = evaluation_prompts(**chosen)
    measured = {name: choices.pop(name) for name in ("seed", "wait_until_idle_s")}
    sizes, command = choices.pop("requests_at_once"), choices["engine_command"]
    with compared_arms(profile, document, prompts, console, names=names, **choices) as (compared, device):
        result = run_bench(document, compared, console, device=device, **measured)
    loads = measured_loads(document, compared.prompts, sizes, command, console)
    result |= {"profile": str(profile), "loads": loads}
    if table is not None:
        write_table(table, runs_dataframe(result["runs"]))
    if as_json:
        options.print_json(result)
