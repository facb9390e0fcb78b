"""``autotune record``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.documents.execution import EAGER
from autotune.documents.option_fields import make_settings
from autotune.study.search_settings import SearchSettings


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
@options.device_map
@options.shard_draft
@options.device
@options.num_prompts(64)
@options.output("traces", "Folder to write.")
@options.as_json
def command(output: Path, num_prompts: int, as_json: bool, **values: Any) -> None:
    """Record traces: the draft's proposals along the target's answers."""
    from autotune.cli.preflight import require_models, require_workload
    from autotune.documents.search_space import subnets_of_drafts
    from autotune.files import require_writable

    require_writable(output / "keep-1.trace.json")
    settings = make_settings(SearchSettings, values)
    space = subnets_of_drafts(settings.changes)
    require_workload(settings.workload, settings.workload_format)
    require_models(settings.target, settings.drafts)

    from autotune.console import Console
    from autotune.machine.device import choose_device
    from autotune.recording.traces import agreement_table, record_traces, recorder_of
    from autotune.runtime.model_pool import load_pool, variants_of

    console = Console()
    prompts = settings.load_prompts("tune", num_prompts)
    model_pool = load_pool(settings, choose_device(settings.device), console, mode=EAGER)
    prompts = prompts.fitting(model_pool.processor, model_pool.target.max_context, console.say)
    prompts = recorder_of(model_pool, output).follow(prompts)
    traces = record_traces(model_pool, variants_of(model_pool, space), prompts, output, console)
    console.show(agreement_table(traces))
    if as_json:
        options.print_json(
            [
                {
                    "draft": trace.header.draft.id,
                    **trace.header.subnet.model_dump(mode="json"),
                    "agreement": trace.agreement().pivot(index="rank", columns="task", values="share").to_dict(),
                }
                for trace in traces
            ]
        )
