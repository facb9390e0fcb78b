"""``autotune profile``."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.options import (
    Duration,
    Verb,
    capture_sizes_option,
    device_option,
    drafts_option,
    heads_option,
    injection_option,
    json_option,
    mode_option,
    output_option,
    target_option,
    workload_option,
)


@click.command(cls=Verb, short_help="Measure a cost table: latencies of target and drafts on a device.")
@target_option
@drafts_option
@heads_option(multiple=True)
@injection_option
@workload_option
@device_option
@click.option("--budget", type=Duration(), default="90s", show_default=True, help="Time limit of the measurements.")
@capture_sizes_option
@mode_option
@output_option("pair.cost.json", "Cost table to write.")
@json_option
def command(
    target: str,
    drafts: tuple[str, ...],
    heads: tuple[float, ...],
    injection_layer: int | None,
    workload: str,
    device: str,
    budget: float,
    capture_sizes: tuple[int, ...],
    mode: str,
    output: Path,
    as_json: bool,
) -> None:
    """Measure a cost table: the latency of the forward passes of target and drafts on a device."""
    from autotune.cli.preflight import require_workload
    from autotune.files import require_writable

    require_writable(output)
    require_workload(workload)

    from autotune.console import Console
    from autotune.device import choose_device
    from autotune.documents.subnet import Subnet
    from autotune.search.cost_tables import measure_table, print_table
    from autotune.search.model_pool import ModelPool
    from autotune.workloads.workload import load_workload

    console = Console()
    prompts = load_workload(workload, "tune")
    model_pool = ModelPool(target, drafts, choose_device(device), capture_sizes, mode)
    subnets = [Subnet(heads=share, injection_layer=injection_layer) for share in heads or (None,)]
    variants = [(draft, subnet) for draft in model_pool.references for subnet in subnets]
    table = measure_table(model_pool, variants, prompts, console, budget)
    table.save(output)
    print_table(table, console)
    console.say(f"cost table written to {output}")
    if as_json:
        click.echo(table.dump())
