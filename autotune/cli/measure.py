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
@options.output(None, "Cost table to write.  [default: pair.cost.json, or the next free name]")
@options.table("a row for every measured point")
@options.as_json
def command(
    target: str, drafts: tuple[str, ...], workload: str | None, output: Path | None, as_json: bool, **choices: Any
) -> None:
    """Measure a cost table: the latency of the forward passes of target and drafts on a device."""
    from autotune.cli.preflight import require_models, require_workload
    from autotune.files import WORKSPACE, content_key, write_table
    from autotune.modeling.target_defaults import default_drafts, default_workload
    from autotune.search.space import subnets_of_drafts
    from autotune.study.outputs import choose_output, settings_key

    are_named = bool(drafts)
    drafts = drafts or default_drafts(target)
    workload = workload or default_workload(target)
    table_file = choices.pop("table")
    key = settings_key({"target": target, "drafts": drafts, "workload": workload, **choices}, workload)
    output = choose_output(output, "pair.cost.json", key)
    space = subnets_of_drafts(choices["changes"])
    require_workload(workload, choices["workload_format"])
    require_models(target, drafts)

    from autotune.console import Console
    from autotune.contention_monitor import wait_until_idle
    from autotune.device import choose_device
    from autotune.measuring.block_log import BlockLog
    from autotune.search.cost_tables import measure_table, priced_variants, print_table
    from autotune.search.model_pool import ModelPool
    from autotune.workloads.workload import load_workload

    console = Console()
    prompts = load_workload(workload, "tune", format=choices["workload_format"]).first_turns()
    execution = choices["capture_sizes"], choices["mode"], choices["dtype"]
    has_random_weights = choices["random_weights"]
    options_of_pool: dict[str, Any] = {"random_weights": has_random_weights, "leaves_out": not are_named}
    model_pool = ModelPool(
        target, drafts, choose_device(choices["device"]), *execution, console=console, **options_of_pool
    )
    if has_random_weights:
        console.say("weights are random: this table's latencies hold, its models accept nothing of each other")
        prompts = prompts.readable_by(model_pool.processor)
    prompts = prompts.with_variables(choices["chat_template_kwargs"])
    prompts = prompts.fitting(model_pool.processor, model_pool.target.max_context, console.say)
    variants = priced_variants(model_pool.subnets(space))
    if choices["wait_until_idle_s"] is not None:
        wait_until_idle(choices["wait_until_idle_s"], str(model_pool.target.device), console)
    log = BlockLog(WORKSPACE / "measured" / f"{content_key([key, model_pool.key])}.jsonl")
    table = measure_table(model_pool, variants, prompts, console, choices["budget"], log)
    table = table.model_copy(update={"provenance": table.provenance.model_copy(update={"settings_key": key})})
    table.save(output)
    log.path.unlink(missing_ok=True)
    if table_file is not None:
        write_table(table_file, table.to_dataframe())
    print_table(table, console)
    console.say(f"cost table written to {output}")
    if as_json:
        click.echo(table.dump())
