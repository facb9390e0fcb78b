"""``autotune serve``."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import click

from autotune.cli import options
from autotune.cli.verb import Verb
from autotune.documents.option_fields import make_settings
from autotune.modeling.loading import Dtype
from autotune.serve.settings import ServeSettings


@click.command(cls=Verb, short_help="Answer requests in the form of OpenAI's API with a profile.")
@click.argument("profile", type=click.Path(path_type=Path))
@options.settings_options(ServeSettings)
@click.option(
    "--api-key",
    envvar="AUTOTUNE_API_KEY",
    show_envvar=True,
    help="Key that requests give. Other users of the machine see it here, and not in the environment.",
)
@options.chat_template_kwargs
@options.device_map
@options.shard_draft
@options.device
@options.profile_dtype
@options.as_json
def command(
    profile: Path,
    device: str,
    dtype: Dtype | None,
    as_json: bool,
    chat_template_kwargs: dict[str, Any] | None,
    **values: Any,
) -> int:
    """Answer /v1/chat/completions and /v1/completions in the form of OpenAI's API; also /v1/models, /health and
    /metrics. The runtime answers one request after the other; a profile of an engine starts the engine, which answers.
    SIGTERM, SIGHUP or Ctrl-C ends the server when accepted requests are answered, a second one at once. With --json, an
    object says where requests are answered, as soon as they are.
    """
    from autotune.cli.preflight import require_profile

    settings = make_settings(ServeSettings, values)
    document = require_profile(profile)
    target, deployment = document.target.id, document.point.deployment
    name = settings.model_name or (Path(target).name if Path(target).is_absolute() else target)
    click.echo(f"loading the models of {profile}", err=True)

    from autotune.console import Console
    from autotune.serve.address import listen

    console = Console()

    def announce(max_model_len: int | None = None) -> None:
        length = "" if max_model_len is None else f", prompts and answers of up to {max_model_len} tokens"
        lossy = "" if document.point.verification.is_lossless else "; LOSSY, by the profile"
        console.say(f"{address}/v1 answers for {name!r}{length}{lossy}")
        if as_json:
            options.print_json({"url": address, "model": name, "max_model_len": max_model_len})

    if deployment is not None:
        from autotune.engines.process import serve_deployment
        from autotune.search.backends import restored_backend

        if not Path(deployment.command[0]).exists():  # the profile is of another machine
            deployment = restored_backend(document).deploy(deployment.speculation)
        listener, address = listen(settings)
        listener.close()
        serve_deployment(deployment, address, name, settings.api_key, announce)
        return 0

    from autotune.serve.server import ApiServer

    listener, address = listen(settings)
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("autotune.requests").setLevel(logging.INFO)  # a line for every request

    from autotune.runtime.load import load

    changed = document.model_copy(update={"chat_template_kwargs": chat_template_kwargs})
    load_profile = partial(
        load, profile if chat_template_kwargs is None else changed, device=device, dtype=dtype, console=console
    )
    server = ApiServer(load_profile, settings.model_copy(update={"model_name": name}), announce)
    return server.answer_until_signal(listener)
