"""``autotune search``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autotune.cli import options
from autotune.cli.verb import Verb, options_of, word_of
from autotune.documents.option_fields import make_settings
from autotune.errors import UserError
from autotune.search.settings import SearchSettings

if TYPE_CHECKING:
    from autotune.documents.engine_profile import EngineName

ENGINES = ("llama.cpp", "vllm")
OF_ENGINES = ("target", "workload", "workload_format", "max_new_tokens", "seed", "output")
"""Options that a search in an engine takes."""
DEMONSTRATION = "no --target: tuning the bundled demonstration `digits`; give --target MODEL for a model of your own"
ONLY_ENGINES = ("engine_command", "url", "requests_at_once")


@click.command(cls=Verb, short_help="Find the fastest draft and token tree; write a profile.")
@options.settings_options(SearchSettings)
@options.chat_template_kwargs
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default=None,
    help="Tune the speculation of this serving engine instead of this runtime's: by n-grams, and in vllm by a --draft; needs --target.",
)
@click.option(
    "--engine-command",
    default=None,
    hidden=True,
    help="Executable of the engine with further arguments, in one word, such as 'llama-server -t 4'.  [default: llama-server or "
    "vllm on the PATH]",
)
@click.option(
    "--url",
    default=None,
    hidden=True,
    help="Address of an engine that runs, http://HOST:PORT, instead of starting one.",
)
@options.requests_at_once
@click.option("--plan", "is_plan", is_flag=True, help="Print what would be tried, its time and memory, and stop.")
@options.verbose
@options.as_json
@click.pass_context
def command(
    context: click.Context, /, as_json: bool, is_verbose: bool, is_plan: bool, engine: EngineName | None, **values: Any
) -> None:
    """Measure costs, record traces, search trees by replay, measure the finalists, and write a decoding profile.

    An interrupted search is continued by the same command.
    """
    from autotune.cli.preflight import require_models, require_workload

    own = {name: values.pop(name) for name in ONLY_ENGINES}
    if engine is not None:
        from autotune.workloads.workload import TEXTS

        given = [p for p in context.params if context.get_parameter_source(p) is not ParameterSource.DEFAULT]
        known = {*OF_ENGINES, *ONLY_ENGINES, "drafts", "engine", "as_json", "is_verbose"}
        named = {option.name: option for option in options_of(context.command)}
        if refused := [name for name in given if name not in known]:
            raise UserError(
                f"--{word_of(named[refused[0]])}: not an option of a search in {engine}, which tunes speculation in that engine; drop it"
            )
        drafts = values["drafts"] if "drafts" in given else ()
        if len(drafts) > 1:
            raise UserError(f"--draft: a search in {engine} tunes one draft model; give one")
        if "target" not in given:
            raise UserError(f"--engine {engine} needs --target; give a model that the engine loads")
        values["workload"] = values["workload"] or ",".join(TEXTS)
        require_workload(values["workload"], values["workload_format"], both_splits=True)
        click.echo(f"tuning {values['target']} in {engine}", err=True)

        from autotune.console import Console
        from autotune.documents.answer import answer_of_engine
        from autotune.engines.engine_search import EngineSearchSettings, search_engine

        console = Console(is_verbose)
        chosen = {name: values[name] for name in OF_ENGINES}
        engine_settings = EngineSearchSettings(engine, **chosen, **own, draft=next(iter(drafts), None)).with_output()
        engine_profile = search_engine(engine_settings, console)
        if as_json:
            click.echo(engine_profile.dump())
        else:
            assert engine_settings.output is not None, "with_output sets it"
            console.answer(answer_of_engine(engine_profile, engine_settings.output))
        return
    if name := next((name for name, value in own.items() if value), None):
        raise UserError(f"--{name.replace('_', '-')} is of a search in an engine; add --engine {' or '.join(ENGINES)}")

    from autotune.search.settings import check_settings

    settings = make_settings(SearchSettings, values)
    if settings.random_weights:
        click.echo(f"pricing {settings.target} on {settings.gpu} by its config", err=True)

        from autotune.console import Console
        from autotune.search.pair_prices import price_pair

        table = price_pair(settings, Console(is_verbose))
        if as_json:
            click.echo(table.dump())
        return
    settings = check_settings(settings)
    require_workload(settings.workload, settings.workload_format, both_splits=True)
    is_given = context.get_parameter_source("target") is not ParameterSource.DEFAULT
    click.echo(f"tuning {settings.target}" if is_given else DEMONSTRATION, err=True)
    require_models(settings.target, settings.drafts)

    from autotune.console import Console

    if is_plan:
        from autotune.search.forecast import forecast

        lines = forecast(settings, Console(is_verbose))
        options.print_json({"plan": lines}) if as_json else click.echo("\n".join(lines))
        return

    from autotune.documents.answer import answer_of
    from autotune.search.pipeline import search

    console = Console(is_verbose)
    document = search(settings, console)
    if as_json:
        click.echo(document.dump())
    else:
        assert settings.output is not None, "check_settings sets it"
        console.answer(answer_of(document, settings.output))
