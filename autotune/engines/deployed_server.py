"""A deployment of a profile as a server for other programs. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from autotune.documents.deployment import Deployment
from autotune.engines.process import running
from autotune.errors import UserError

NAME_OPTIONS = {"llama.cpp": "--alias"}
"""Options of engines that give the model's name; the others have ``--served-model-name``."""
KEY_VARIABLES = {"llama.cpp": "LLAMA_API_KEY", "vllm": "VLLM_API_KEY"}
"""Environment variables of the key, which other users of the machine do not see there."""


def serve_deployment(
    deployment: Deployment, url: str, model_name: str, api_key: str | None, announce: Callable[[], None]
) -> None:
    """Start the engine of a deployment at an address, and wait until Ctrl-C or SIGTERM, which end it.

    Args:
        announce: called when the engine is healthy.

    Raises:
        UserError: the engine cannot be started, has no variable for the key, or ends by itself.
    """
    backend = deployment.backend
    if api_key is not None and backend not in KEY_VARIABLES:
        raise UserError(f"--api-key: autotune knows no variable of {backend} for a key; leave it out")
    name_option = NAME_OPTIONS.get(backend, "--served-model-name")
    words = [*deployment.command, "--host", str(urlsplit(url).hostname), name_option, model_name]
    environment = {} if api_key is None else {KEY_VARIABLES[backend]: api_key}
    try:
        with running(words, backend, url, **environment) as (_, process):
            announce()
            process.wait()
            raise UserError(f"{backend} ended")
    except KeyboardInterrupt:
        return
