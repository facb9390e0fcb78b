"""Servers in threads of this process, and requests to them."""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from autotune.modeling.loading import reference
from autotune.runtime.decoder import Decoder
from autotune.serve.address import listen
from autotune.serve.server import ApiServer
from autotune.serve.settings import ServeSettings
from tests.cli.processes import start_command
from tests.sample_documents import decoding_profile
from tests.tiny_models import Pair

NAME = "tiny"


@contextmanager
def running(load: Callable[[], Decoder], **settings: Any) -> Iterator[tuple[ApiServer, str]]:
    """A server on a free port, and its URL, as soon as it accepts connections."""
    chosen = ServeSettings(port=0, model_name=NAME, **{"drain_s": 0.0, **settings})
    server, (listener, url) = ApiServer(load, chosen, lambda _: None), listen(chosen)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(server.answer_until_signal(listener)))
    thread.start()
    try:
        yield server, url
    finally:
        server.handle_exit(15, None)
        thread.join(600)
        assert not thread.is_alive()
        server.exit_code = codes[0]  # type: ignore[attr-defined]


def wait_for(condition: Callable[[], Any], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_ready(url: str) -> None:
    wait_for(lambda: get(url, "/health")[0] == 200)


def start_serving(pair: Pair, folder: Path) -> tuple[BaseProcess, Path]:
    """Start the command on a free port with a profile of the pair; returns its process and its log."""
    target, draft = (reference(str(one)) for one in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft).save(folder / "profile.json")
    log = folder / "log"
    return start_command(
        "serve", "profile.json", "--port", "0", "--json", "--drain", "300s", folder=folder, log=log
    ), log


def url_of(process: BaseProcess, log: Path) -> str:
    """The URL that ``autotune serve --json`` prints to ``log``.out when it is ready."""
    printed, said = log.with_suffix(".out"), log.with_suffix(".err")
    wait_for(lambda: not process.is_alive() or (printed.exists() and printed.read_text().endswith("}\n")))
    assert process.is_alive(), said.read_text()
    return str(json.loads(printed.read_text())["url"])


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)


def get(url: str, path: str, **headers: str) -> tuple[int, Any]:
    """The status and the content of an answer: an object, or a text that is none."""
    return send(url, path, None, headers)[:2]


def send(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """Post a body, JSON unless it is bytes; returns status, content and headers."""
    connection = connect(url)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        text = response.read().decode()
        try:
            return response.status, json.loads(text), response.headers
        except ValueError:
            return response.status, text, response.headers
    finally:
        connection.close()


def begin(url: str, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Post a body, and read no answer."""
    connection = connect(url)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
