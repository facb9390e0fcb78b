"""``autotune serve``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli import options
from autotune.errors import UserError
from autotune.modeling.loading import Dtype

if TYPE_CHECKING:
    from autotune.api.service import DecoderService


@click.command(short_help="Answer requests in the form of OpenAI's API with a profile.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen at; with a key, also other machines'."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: a free one.")
@click.option(
    "--api-key",
    envvar="AUTOTUNE_API_KEY",
    show_envvar=True,
    default=None,
    help="Key that requests have to give. In the environment other users of the machine do not see it.",
)
@click.option("--model-name", default=None, help="Name of the model in requests.  [default: the profile's target]")
@click.option(
    "--max-waiting",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    help="Requests that may wait; others get 429.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    default=None,
    help="Longest prompt and answer together, in tokens.  [default: the target's context]",
)
@click.option(
    "--drain",
    type=options.Duration(),
    default="30s",
    show_default=True,
    help="After SIGTERM or Ctrl-C: longest time in which admitted requests are finished.",
)
@options.device
@options.profile_dtype
@options.as_json
def command(
    profile: Path,
    host: str,
    port: int,
    api_key: str | None,
    model_name: str | None,
    max_waiting: int,
    max_model_len: int | None,
    drain: float,
    device: str,
    dtype: Dtype | None,
    as_json: bool,
) -> int:
    """Answer /v1/chat/completions and /v1/completions in the form of OpenAI's API, one request after the other; also /v1/models,
    /health and /metrics. The first SIGTERM or Ctrl-C ends the server when the admitted requests are answered, the second at
    once. With --json, a line says when and where requests are answered.
    """
    from autotune.cli.preflight import require_profile

    if api_key == "":
        raise UserError("--api-key: a key has at least one character; got none; give one, or leave it out")
    require_profile(profile)
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        message = f'autotune serve needs {error.name}; pip install "autotune-speculative[serve]"'
        raise UserError(message) from None
    import functools
    import logging

    from autotune.api.server import listen, serve
    from autotune.console import Console
    from autotune.documents.decoding_profile import DecodingProfile
    from autotune.runtime.load import load

    document, console = DecodingProfile.load(profile), Console()
    listener = listen(host, port, has_key=api_key is not None)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    target = document.target.id
    model = model_name or (Path(target).name if Path(target).is_absolute() else target)  # no path for clients

    def is_ready(service: DecoderService) -> None:
        if as_json:
            options.print_json({"url": address, "model": model, "max_model_len": service.max_model_len})
        lossy = "" if all(point.lossless for point in document.points) else "; LOSSY, by the profile"
        console.say(f"{address}/v1 answers for the model {model}, up to {service.max_model_len} tokens{lossy}")

    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("autotune.requests").setLevel(logging.INFO)  # a line for every request
    return serve(
        functools.partial(load, profile, device=device, dtype=dtype, console=console),
        listener,
        model=model,
        api_key=api_key,
        max_waiting=max_waiting,
        max_model_len=max_model_len,
        drain_s=drain,
        is_ready=is_ready,
    )
