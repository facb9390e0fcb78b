"""Serving engines that this program starts and stops. Loads no torch."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from autotune.engines.http import open_url
from autotune.errors import UserError

START_S = 900.0  # longest time until an engine is ready: it may compile kernels
STOP_S = 30.0  # until it is killed
ENDING_S = 1.0  # from a connection that is lost until its server has ended
# The causes of a failure in an engine's log: lines with an exception's name and message, of llama.cpp's level E, or
# with what the command line refuses. The first is the cause; later ones say that a process failed.
_CAUSE = re.compile(r"(?:[\d.]+ E [\w ]+|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)|\w+: error|error): +(?P<message>\S.*)")
_PR_SET_PDEATHSIG = 1
_HEADING = re.compile(r"\d+ validation errors? for ")  # pydantic's message follows in the next lines
_PREFIX = re.compile(r"^\([^)]*pid=\d+\) ?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")


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
