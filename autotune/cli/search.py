"""``autotune search``."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.documents.deployment import RUNTIME
from autotune.documents.option_fields import make_settings
from autotune.study.search_settings import SearchSettings

DEMONSTRATION = "no --target: tuning the bundled demonstration `digits`; give --target MODEL for a model of your own"


@click.command(cls=Verb, short_help="Find the fastest draft and token tree, or backend; write a profile.")
@options.settings_options(SearchSettings)
@options.chat_template_kwargs
@options.device_map
@options.shard_draft
@options.loads
@click.option("--plan", "is_plan", is_flag=True, help="Print what would be tried, its time and memory, and stop.")
@options.verbose
@options.as_json
@click.pass_context
def command(context: click.Context, /, as_json: bool, is_verbose: bool, is_plan: bool, **values: Any) -> None:
    """Measure costs, record answers, search by replay, measure the finalists, and write a decoding profile.

    With several --backend, the best configuration of each races on held-out prompts, and the profile deploys the
    fastest. An interrupted search is continued by the same command.
    """
    from autotune.cli.preflight import require_models, require_workload
    from autotune.study.search_settings import check_settings

    settings = make_settings(SearchSettings, values)
    if settings.backends:  # engines take time to import
        click.echo(f"tuning {settings.target} in {', '.join(settings.backends)}", err=True)
    models = [settings.target]
    if settings.names_backends:
        from autotune.search.backends import choose_backends

        models = [choice.model for choice in choose_backends(settings, is_plan=is_plan) if choice.name == RUNTIME]
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
    if not settings.backends:
        click.echo(f"tuning {settings.target}" if is_given else DEMONSTRATION, err=True)
    for model in models:
        require_models(model, settings.drafts)

    from autotune.console import Console

    console = Console(is_verbose)
    if is_plan:
        from autotune.search.forecast import forecast

        lines = forecast(settings, console)
        options.print_json({"plan": lines}) if as_json else click.echo("\n".join(lines))
        return

    from autotune.documents.answer import answer_of
    from autotune.search.backend_race import search_backends
    from autotune.search.backends import found_engines

    document = search_backends(settings, console)
    if not settings.backends and (engines := found_engines()):
        others = " ".join(f"--backend {name}" for name in engines)
        console.say(f"also here  {', '.join(engines)}: --backend {RUNTIME} {others} lets them race (docs/engines.md)")
    if as_json:
        click.echo(document.dump())
    else:
        assert settings.output is not None, "check_settings sets it"
        console.answer(answer_of(document, settings.output))
