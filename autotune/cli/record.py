"""``autotune record``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.documents.subnet import VISUAL_INPUTS
from autotune.search.settings import SearchSettings


@click.command(cls=Verb, short_help="Record traces: a draft's proposals along the target's answers.")
@options.settings_options(
    SearchSettings,
    "target",
    "dtype",
    "drafts",
    "changes",
    "workload",
    "workload_format",
    "max_new_tokens",
    "temperature",
)
@options.chat_template_kwargs
@options.device
@click.option(
    "--visual-input",
    type=click.Choice(VISUAL_INPUTS),
    default="features",
    show_default=True,
    hidden=True,
    help="How an independent draft reads images: placeholders are read as text, as some serving engines do.",
)
@options.num_prompts(64)
@options.output("traces", "Folder to write.")
@options.as_json
def command(target: str, drafts: tuple[str, ...], workload: str, output: Path, as_json: bool, **choices: Any) -> None:
    """Record traces: the draft's proposals along the target's answers."""
    from autotune.cli.preflight import require_models, require_workload
    from autotune.files import require_writable
    from autotune.modeling.target_defaults import default_drafts, default_workload
    from autotune.search.space import subnets_of_drafts

    require_writable(output / "keep-1.trace.json")
    space = subnets_of_drafts(choices["changes"])
    are_named = bool(drafts)
    drafts, workload = drafts or default_drafts(target), workload or default_workload(target)
    require_workload(workload, choices["workload_format"])
    require_models(target, drafts)

    from autotune.console import Console
    from autotune.device import choose_device
    from autotune.search.model_pool import ModelPool
    from autotune.search.traces import print_agreement, record_traces
    from autotune.workloads.workload import load_workload

    console = Console()
    num_prompts, format = choices["num_prompts"], choices["workload_format"]
    prompts = load_workload(workload, "tune", num_prompts=num_prompts, format=format)
    if choices["temperature"] is not None:
        prompts = prompts.sampled(choices["temperature"])
    device, dtype = choose_device(choices["device"]), choices["dtype"]
    model_pool = ModelPool(target, drafts, device, dtype=dtype, console=console, leaves_out=not are_named)
    prompts = prompts.cut(num_prompts, choices["max_new_tokens"]).with_variables(choices["chat_template_kwargs"])
    prompts = prompts.fitting(model_pool.processor, model_pool.target.max_context, console.say)
    prompts = model_pool.recorder(output).follow(prompts)
    variants = model_pool.subnets(space)
    traces = record_traces(model_pool, variants, prompts, output, console, visual_input=choices["visual_input"])
    print_agreement(traces, console)
    if as_json:
        agreements = [trace.agreement().pivot(index="rank", columns="task", values="share") for trace in traces]
        results = []
        for header, agreement in zip((trace.header for trace in traces), agreements, strict=True):
            ranking, shares = header.subnet.visual_ranking, agreement.to_dict()
            result = {"draft": header.draft.id, "visual_keep": header.subnet.visual_keep}
            results.append({**result, "visual_ranking": ranking, "agreement": shares})
        options.print_json(results)
