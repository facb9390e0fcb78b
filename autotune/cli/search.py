"""``autotune search``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autotune.cli import options
from autotune.errors import UserError
from autotune.option_fields import make_settings
from autotune.search.settings import SearchSettings

if TYPE_CHECKING:
    from autotune.documents.engine_profile import EngineName

ENGINES = ("llama.cpp", "vllm")
OF_ENGINES = ("target", "workload", "workload_format", "max_new_tokens", "seed", "output")
"""Options that a search in an engine takes."""
ONLY_ENGINES = ("engine_command", "url", "requests_at_once")


@click.command(short_help="Find the fastest draft and token tree; write a profile.")
@options.settings_options(SearchSettings)
@options.chat_template_kwargs
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default=None,
    help="Tune the speculation of this serving engine instead of this runtime's: by n-grams, and in vllm by a --draft; needs --target and --workload.",
)
@click.option(
    "--engine-command",
    default=None,
    help="Executable of the engine with further arguments, in one word, such as 'llama-server -t 4'.  [default: llama-server or "
    "vllm on the PATH, or the one that make engines built]",
)
@click.option("--url", default=None, help="Address of an engine that runs, http://HOST:PORT, instead of starting one.")
@options.requests_at_once
@options.as_json
@click.pass_context
def command(context: click.Context, /, as_json: bool, engine: EngineName | None, **values: Any) -> None:
    """Measure costs, record traces, search trees by replay, measure the finalists, and write a decoding profile.

    An interrupted search is continued by the same command.
    """
    from autotune.cli.preflight import require_models, require_workload

    own = {name: values.pop(name) for name in ONLY_ENGINES}
    if engine is not None:
        from autotune.console import Console
        from autotune.serving.engine_search import EngineSearchSettings, search_engine

        given = [p for p in context.params if context.get_parameter_source(p) is ParameterSource.COMMANDLINE]
        known = {*OF_ENGINES, *ONLY_ENGINES, "drafts", "engine", "as_json"}
        if refused := [name for name in given if name not in known]:
            raise UserError(
                f"--{refused[0].replace('_', '-')}: not an option of a search in {engine}, which tunes speculation in that engine; drop it"
            )
        drafts = values["drafts"] if "drafts" in given else ()
        if len(drafts) > 1:
            raise UserError(f"--draft: a search in {engine} tunes one draft model; give one")
        if missing := [name for name in ("target", "workload") if name not in given]:
            raise UserError(f"--engine {engine} needs --{missing[0]}; give a model and a file of prompts")
        require_workload(values["workload"], values["workload_format"])
        chosen = {name: values[name] for name in OF_ENGINES}
        profile = search_engine(
            EngineSearchSettings(engine, **chosen, **own, draft=next(iter(drafts), None)), Console()
        )
        if as_json:
            click.echo(profile.dump())
        return
    if name := next((name for name, value in own.items() if value), None):
        raise UserError(f"--{name.replace('_', '-')} is of a search in an engine; add --engine {' or '.join(ENGINES)}")

    from autotune.search.settings import check_settings

    settings = make_settings(SearchSettings, values)
    if settings.random_weights:
        from autotune.console import Console
        from autotune.search.pair_prices import price_pair

        table = price_pair(settings, Console())
        if as_json:
            click.echo(table.dump())
        return
    check_settings(settings)
    require_models(settings.target, settings.drafts)
    require_workload(settings.workload, settings.workload_format)

    from autotune.console import Console
    from autotune.search.pipeline import search

    document = search(settings, Console())
    if as_json:
        click.echo(document.dump())
