"""``autotune measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.search.settings import SearchSettings


@click.command(cls=Verb, short_help="Measure a cost table: latencies of models on a device.")
@options.settings_options(SearchSettings, "target", "dtype", "drafts")
@options.settings_options(SearchSettings, "changes")
@options.workload
@options.workload_format
@options.chat_template_kwargs
@options.device
@options.random_weights
@click.option(
    "--budget", type=options.Duration(), default="90s", show_default=True, help="Time limit of the measurements."
)
@options.settings_options(SearchSettings, "wait_until_idle_s", "capture_sizes", "mode")
@options.output("pair.cost.json", "Cost table to write.")
@options.table("a row for every measured point")
@options.as_json
def command(
    target: str, drafts: tuple[str, ...], workload: str | None, output: Path, as_json: bool, **choices: Any
) -> None:
    """Measure a cost table: the latency of the forward passes of target and drafts on a device."""
    from autotune.cli.preflight import require_models, require_workload
    from autotune.files import require_writable, write_table
    from autotune.modeling.loading import default_drafts, default_workload
    from autotune.search.space import subnets_of_drafts

    require_writable(output)
    space = subnets_of_drafts(choices["changes"])
    drafts, workload = drafts or default_drafts(target), workload or default_workload(target)
    require_workload(workload, choices["workload_format"])
    require_models(target, drafts)

    from autotune.console import Console
    from autotune.contention_monitor import wait_until_idle
    from autotune.device import choose_device
    from autotune.search.cost_tables import measure_table, priced_variants, print_table
    from autotune.search.model_pool import ModelPool
    from autotune.workloads.workload import load_workload

    console = Console()
    prompts = load_workload(workload, "tune", format=choices["workload_format"]).first_turns()
    execution = choices["capture_sizes"], choices["mode"], choices["dtype"]
    has_random_weights = choices["random_weights"]
    model_pool = ModelPool(
        target, drafts, choose_device(choices["device"]), *execution, random_weights=has_random_weights, console=console
    )
    if has_random_weights:
        console.say("weights are random: this table's latencies hold, its models accept nothing of each other")
        prompts = prompts.readable_by(model_pool.processor)
    prompts = prompts.with_variables(choices["chat_template_kwargs"])
    prompts = prompts.fitting(model_pool.processor, model_pool.target.max_context, console.say)
    variants = priced_variants(model_pool.subnets(space))
    if choices["wait_until_idle_s"] is not None:
        wait_until_idle(choices["wait_until_idle_s"], str(model_pool.target.device), console)
    table = measure_table(model_pool, variants, prompts, console, choices["budget"])
    table.save(output)
    if choices["table"] is not None:
        write_table(choices["table"], table.to_dataframe())
    print_table(table, console)
    console.say(f"cost table written to {output}")
    if as_json:
        click.echo(table.dump())
