"""``autotune run``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.errors import UserError
from autotune.modeling.loading import Dtype
from autotune.workloads.formats import Format

if TYPE_CHECKING:
    from autotune.workloads.chat import Variables
    from autotune.workloads.prompt import WorkloadPrompt


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

    if workload is not None and (prompt is not None or images):
        raise UserError("give either --workload, or --prompt with --image; got both; drop one")
    if images and prompt is None:
        raise UserError("an image needs a question; add --prompt TEXT")
    document = require_profile(profile)
    chosen = "" if prompt is not None else workload_for(profile, workload, workload_format)
    prompts = _prompts(prompt, images, chosen, workload_format, settings, whole=workload is not None)
    variables = document.chat_template_kwargs if chat_template_kwargs is None else chat_template_kwargs
    prompts = [one.with_variables(variables) for one in prompts]
    click.echo(f"loading the models of {profile}", err=True)

    from autotune.cli.arms import answers

    found = []
    for answer in answers(profile, document, prompts, engine_command, device=device, dtype=dtype, prints=not as_json):
        found.append(answer)
        if not as_json:
            click.echo(answer["summary"], err=True)
    if as_json:
        options.print_json(found if workload is not None else found[0])


def _prompts(
    text: str | None,
    images: tuple[Path, ...],
    workload: str,
    workload_format: Format | None,
    settings: dict[str, Any],
    *,
    whole: bool,
) -> list[WorkloadPrompt]:
    """The prompts to decode, with the settings of the command line instead of their own: the text, the whole workload,
    or its first prompt.
    """
    from pydantic import ValidationError

    from autotune.files import describe
    from autotune.workloads.pixels import load_image
    from autotune.workloads.prompt import Prompt, WorkloadPrompt
    from autotune.workloads.workload import load_workload

    settings = {name: value for name, value in settings.items() if value is not None}
    try:
        if text is not None:
            pixels = tuple(load_image(path) for path in images)
            return [WorkloadPrompt("prompt", Prompt(prompt=text, **settings), pixels)]
        Prompt(prompt="", **settings)  # refuses values out of range before the workload is read
        prompts = []
        for prompt in load_workload(
            workload, "evaluate", num_prompts=None if whole else 1, format=workload_format
        ).prompts:
            limit = {"max_new_tokens": min(prompt.settings.max_new_tokens, settings["max_new_tokens"])}
            prompts.append(replace(prompt, settings=Prompt(**{**prompt.settings.model_dump(), **settings, **limit})))
        return prompts
    except ValidationError as error:
        raise UserError(f"--{describe(error, Prompt).replace('_', '-')}") from None
