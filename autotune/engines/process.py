"""Serving engines that this program starts and stops. Loads no torch."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autotune.documents.deployment import Deployment
from autotune.errors import UserError
from autotune.files import user_cache

THIS_MACHINE = ("localhost", "0.0.0.0", "::1", "::")
NAME_OPTIONS = {"llama.cpp": "--alias"}
"""Options of engines that give the model's name; the others have ``--served-model-name``."""
KEY_VARIABLES = {"llama.cpp": "LLAMA_API_KEY", "vllm": "VLLM_API_KEY"}
"""Environment variables of the key, which other users of the machine do not see there."""
START_S = 900.0  # longest time until an engine is ready: it may compile kernels
STOP_S = 30.0  # until it is killed
ENDING_S = 1.0  # from a connection that is lost until its server has ended
# The causes of a failure in an engine's log: lines with an exception's name and message, of llama.cpp's level E, or
# with what the command line refuses. The first is the cause; later ones say that a process failed.
_CAUSE = re.compile(r"(?:[\d.]+ E [\w ]+|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)|\w+: error|error): +(?P<message>\S.*)")
_PR_SET_PDEATHSIG = 1
_HEADING = re.compile(r"\d+ validation errors? for ")  # pydantic's message follows in the next lines
_PREFIX = re.compile(r"^\([^)]*pid=\d+\) ?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")


def built_here(engine: str, program: str) -> str | None:
    """The executable that ``make engines`` of this project's sources has built; None if it has not."""
    return shutil.which(user_cache().parent / "autotune-engines" / engine / "bin" / program)


def open_url(request: urllib.request.Request, timeout_s: float) -> Any:
    """The response to a request. One to this machine is not sent to the proxy that ``http_proxy`` names."""
    host = urlsplit(request.full_url).hostname or ""
    direct = [urllib.request.ProxyHandler({})] if host in THIS_MACHINE or host.startswith("127.") else []
    return urllib.request.build_opener(*direct).open(request, timeout=timeout_s)


@contextmanager
def running(
    words: Sequence[str], name: str, url: str | None = None, **environment: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server by its command, and yield its address and process when it is healthy; it is stopped at the end.

    Args:
        name: of the program, in error messages.
        url: the address at which it listens; None for a free port of this machine.
        environment: variables of the server, besides those of this program.

    Raises:
        UserError: the server cannot be started, does not answer in time, or ends while it is used.
    """
    url = url or _free_address()
    with tempfile.TemporaryDirectory(prefix="autotune-engine-") as folder:
        log = Path(folder) / "log"
        try:
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [*words, "--port", str(urlsplit(url).port)],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=os.environ | environment,
                    preexec_fn=_end_with_this_program,
                )
        except OSError as error:
            raise UserError(f"{words[0]}: cannot be started ({error.strerror}); name the engine's executable") from None
        when = "when it started"
        try:
            _wait_until_ready(process, url, name)
            when = "while it was used"
            yield url, process
        except UserError:
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            if (code := process.poll()) is None:
                raise
            cause = f"signal {-code}" if code < 0 else refusal(log.read_text(errors="replace"))
            raise UserError(f"{name} ended {when}: {cause}") from None
        finally:
            _stop(process)


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


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def _end_with_this_program() -> None:
    """Let a server that is about to start get SIGTERM when this program ends without stopping it (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, name: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"{name} ended when it started")
        try:
            with open_url(urllib.request.Request(f"{url}/health"), timeout_s=5.0):
                return
        except OSError as error:
            if getattr(error, "code", None) == 404:
                raise UserError(f"{name}: what was started has no /health; name the engine's executable") from None
            time.sleep(0.2)
    raise UserError(
        f"{name} did not answer in {START_S / 60:.0f} minutes; start it by hand to see why, and give its address"
    )


def refusal(log: str) -> str:
    """The cause of a failure in an engine's log, in one line."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    for number, line in enumerate(lines):
        cause = _CAUSE.match(line)
        if cause is None:
            continue
        message = cause["message"]
        if _HEADING.match(message) and number + 1 < len(lines):
            message = lines[number + 1].partition(" [type=")[0].removeprefix("Value error, ")
        return message
    return next((line for line in reversed(lines) if line), "it says nothing")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process, and its workers, which are in a session of their own; at once if a signal comes meanwhile."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
