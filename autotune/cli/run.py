"""``autotune run``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.documents.option_fields import make_settings
from autotune.errors import UserError
from autotune.modeling.loading import Dtype
from autotune.workloads.formats import Format

if TYPE_CHECKING:
    from autotune.workloads.chat import Variables


@click.command(cls=Verb, short_help="Decode with a profile.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--prompt", default=None, help="Text of the prompt.  [default: a bundled prompt]")
@click.option("--image", "images", multiple=True, type=click.Path(path_type=Path), help="Image file. Repeatable.")
@click.option("--workload", default=None, help="Decode the evaluation prompts of a workload instead of one prompt.")
@options.workload_format
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Longest answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy decoding.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus of the sampled tokens.")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of the sampled tokens.")
@options.chat_template_kwargs
@options.device_map
@options.shard_draft
@options.device
@options.profile_dtype
@options.engine_command
@options.as_json
def command(
    profile: Path,
    prompt: str | None,
    images: tuple[Path, ...],
    workload: str | None,
    workload_format: Format | None,
    as_json: bool,
    chat_template_kwargs: Variables | None,
    device: str,
    dtype: Dtype | None,
    engine_command: str | None,
    **settings: Any,
) -> None:
    """Decode with a profile: one prompt, the evaluation prompts of a workload, or a bundled example."""
    from autotune.cli.preflight import require_profile, workload_for
    from autotune.workloads.pixels import load_image
    from autotune.workloads.prompt import Prompt, WorkloadPrompt
    from autotune.workloads.workload import load_workload

    if workload is not None and (prompt is not None or images):
        raise UserError("give either --workload, or --prompt with --image; got both; drop one")
    if images and prompt is None:
        raise UserError("an image needs a question; add --prompt TEXT")
    document = require_profile(profile)
    given = make_settings(Prompt, {"prompt": prompt or "", **settings})
    if prompt is None:
        name, number = workload_for(profile, workload, workload_format), None if workload else 1
        prompts = load_workload(name, "evaluate", num_prompts=number, format=workload_format).prompts
        changes = {key: value for key, value in settings.items() if key != "max_new_tokens"}
        cut = [shown.cut(given.max_new_tokens) for shown in prompts]
        prompts = tuple(replace(shown, settings=shown.settings.model_copy(update=changes)) for shown in cut)
    else:
        prompts = (WorkloadPrompt("prompt", given, tuple(map(load_image, images))),)
    variables = document.chat_template_kwargs if chat_template_kwargs is None else chat_template_kwargs
    prompts = tuple(shown.with_variables(variables) for shown in prompts)
    click.echo(f"loading the models of {profile}", err=True)

    from autotune.cli.arms import answers

    decoded = []
    for answer in answers(profile, document, prompts, engine_command, device=device, dtype=dtype, prints=not as_json):
        decoded.append(answer)
        if not as_json:
            click.echo(answer["summary"], err=True)
    if as_json:
        options.print_json(decoded if workload is not None else decoded[0])
