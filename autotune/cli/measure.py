"""``autotune measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.documents.option_fields import make_settings
from autotune.study.search_settings import SearchSettings


@click.command(cls=Verb, short_help="Measure a cost table: latencies of models on a device.")
@options.settings_options(SearchSettings, "target", "dtype", "drafts", "changes")
@options.workload
@options.workload_format
@options.chat_template_kwargs
@options.device_map
@options.shard_draft
@options.device
@options.random_weights
@click.option(
    "--budget",
    "budget_s",
    type=options.DURATION,
    default="90s",
    show_default=True,
    help="Time limit of the measurements.",
)
@options.settings_options(SearchSettings, "wait_until_idle_s", "capture_sizes", "mode")
@options.output(None, "Cost table to write.  [default: pair.cost.json, or the next free name]")
@options.table("a row for every measured point")
@options.as_json
def command(output: Path | None, table: Path | None, as_json: bool, **values: Any) -> None:
    """Measure a cost table: the latency of the forward passes of target and drafts on a device."""
    from autotune.cli.preflight import require_models, require_workload
    from autotune.documents.search_space import subnets_of_drafts
    from autotune.files import WORKSPACE, content_key, write_table
    from autotune.study.outputs import choose_output

    settings = make_settings(SearchSettings, values)
    output = choose_output(output, "pair.cost.json", settings.key)
    space = subnets_of_drafts(settings.changes)
    require_workload(settings.workload, settings.workload_format)
    require_models(settings.target, settings.drafts)

    from autotune.console import Console
    from autotune.machine.contention_monitor import wait_until_idle
    from autotune.machine.device import choose_device
    from autotune.measuring.jobs import JobLog
    from autotune.measuring.tables import measure_table, priced_variants, show_table
    from autotune.runtime.model_pool import load_pool, variants_of

    console = Console()
    prompts = settings.load_prompts("tune").first_turns()
    pool = load_pool(settings, choose_device(settings.device), console)
    if settings.random_weights:
        console.say("weights are random: this table's latencies hold, its models accept nothing of each other")
        prompts = prompts.readable_by(pool.processor)
    prompts = prompts.fitting(pool.processor, pool.target.max_context, console.say)
    if settings.wait_until_idle_s is not None:
        wait_until_idle(settings.wait_until_idle_s, str(pool.target.device), console)
    log = JobLog(WORKSPACE / "measured" / f"{content_key([settings.key, pool.key])}.jsonl")
    measured = measure_table(pool, priced_variants(variants_of(pool, space)), prompts, console, settings.budget_s, log)
    provenance = measured.provenance.model_copy(update={"settings_key": settings.key})
    measured = measured.model_copy(update={"provenance": provenance})
    measured.save(output)
    log.path.unlink(missing_ok=True)
    if table is not None:
        write_table(table, measured.to_dataframe())
    show_table(measured, console)
    console.say(f"cost table written to {output}")
    if as_json:
        click.echo(measured.dump())
