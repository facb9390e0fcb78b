"""``autotune record``."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.options import (
    Verb,
    device_option,
    drafts_option,
    heads_option,
    injection_option,
    json_option,
    output_option,
    print_json,
    prompts_option,
    target_option,
    workload_option,
)
from autotune.errors import UserError


@click.command(cls=Verb, short_help="Record traces: a draft's proposals along the target's answers.")
@target_option
@drafts_option
@heads_option()
@injection_option
@workload_option
@device_option
@click.option(
    "--visual-keep",
    multiple=True,
    type=float,
    default=(1.0,),
    show_default=True,
    help="Share of visual tokens that the draft sees. Repeatable.",
)
@prompts_option(64)
@output_option("traces", "Folder to write.")
@json_option
def command(
    target: str,
    drafts: tuple[str, ...],
    heads: float | None,
    injection_layer: int | None,
    workload: str,
    device: str,
    visual_keep: tuple[float, ...],
    num_prompts: int,
    output: Path,
    as_json: bool,
) -> None:
    """Record traces: the draft's proposals along the target's answers."""
    from autotune.cli.preflight import require_workload
    from autotune.files import require_writable

    require_writable(output / "keep-1.trace.json")
    for keep in visual_keep:
        if not 0.0 < keep <= 1.0:
            raise UserError(f"--visual-keep must be above 0 and at most 1; got {keep:g}; 1 keeps every visual token")
    require_workload(workload)

    from autotune.console import Console
    from autotune.device import choose_device
    from autotune.documents.subnet import Subnet
    from autotune.search.model_pool import ModelPool
    from autotune.search.traces import print_agreement, record_traces
    from autotune.workloads.workload import load_workload

    console = Console()
    prompts = load_workload(workload, "tune", num_prompts=num_prompts)
    model_pool = ModelPool(target, drafts, choose_device(device))
    variants = [
        (draft, Subnet(heads=heads, visual_keep=keep, injection_layer=injection_layer))
        for draft in model_pool.references
        for keep in visual_keep
    ]
    traces = record_traces(model_pool, variants, prompts, output, console)
    print_agreement(traces, console)
    if as_json:
        print_json(
            [
                {
                    "draft": trace.header.draft.id,
                    "visual_keep": trace.header.visual_keep,
                    "agreement": trace.agreement().pivot(index="rank", columns="task", values="share").to_dict(),
                }
                for trace in traces
            ]
        )
