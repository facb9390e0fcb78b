"""``autotune bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.modeling.loading import Dtype
from autotune.study.search_settings import SearchSettings
from autotune.workloads.formats import Format


@click.command(cls=Verb, short_help="Compare a profile with other ways to decode.")
@click.argument("profile", type=click.Path(path_type=Path))
@options.workload
@options.workload_format
@options.chat_template_kwargs
@options.device_map
@options.shard_draft
@options.num_prompts(32)
@click.option(
    "--whole",
    "is_whole",
    hidden=True,
    is_flag=True,
    help="Decode the prompts of both splits: for a workload that the profile was not tuned on.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=None, show_default="of each prompt", help="Longest answer."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=None,
    show_default="of each prompt",
    help="Temperature of all prompts, which are sampled with their numbers as seeds.",
)
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
@options.loads
@options.as_json
def command(
    profile: Path,
    workload: str | None,
    workload_format: Format | None,
    chat_template_kwargs: dict[str, Any] | None,
    arms: str | None,
    draft: str | None,
    seed: int,
    device: str,
    dtype: Dtype | None,
    wait_until_idle_s: float | None,
    table: Path | None,
    engine_command: str | None,
    loads: tuple[int, ...],
    as_json: bool,
    **choices: Any,
) -> None:
    """Measure a profile side by side with plain decoding and other configurations, interleaved in one run."""
    from autotune.cli.preflight import require_profile, workload_for

    document = require_profile(profile)  # before numba is imported

    from autotune.evaluation.bench import evaluation_prompts, require_arms, run_bench

    names = None if arms is None else [name.strip() for name in arms.split(",") if name.strip()]
    require_arms(document, names or ())
    workload = workload_for(profile, workload, workload_format)
    click.echo(f"measuring {profile}", err=True)

    from autotune.cli.arms import compared_arms, measured_loads
    from autotune.console import Console
    from autotune.documents.decoded import runs_dataframe
    from autotune.files import write_table

    console = Console()
    variables = document.chat_template_kwargs if chat_template_kwargs is None else chat_template_kwargs
    prompts = evaluation_prompts(workload, workload_format=workload_format, chat_template_kwargs=variables, **choices)
    with compared_arms(
        profile,
        document,
        prompts,
        console,
        names=names,
        draft=draft,
        device=device,
        dtype=dtype,
        engine_command=engine_command,
    ) as (compared, found_device):
        result = run_bench(
            document, compared, console, device=found_device, seed=seed, wait_until_idle_s=wait_until_idle_s
        )
    result |= {
        "profile": str(profile),
        "loads": measured_loads(document, compared.prompts, loads, engine_command, console),
    }
    if table is not None:
        write_table(table, runs_dataframe(result["runs"]))
    if as_json:
        options.print_json(result)
