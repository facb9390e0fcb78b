"""Replies that no serving engine gives are one line, whatever a server sends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.serving.client import ACCEPTED, EngineClient
from autotune.workloads.prompt import Prompt, WorkloadPrompt

METRICS = "vllm:generation_tokens_total 5.0\n"
ANSWER = {"choices": [{"token_ids": [1, 2], "prompt_token_ids": [3]}]}
REPLIES: dict[str, Any] = {
    "/metrics": METRICS,
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "served"}]},
    "/v1/completions": ANSWER,
}


@contextmanager
def serving(replies: dict[str, Any]) -> Iterator[str]:
    """A server of fixed replies: text and objects are sent as HTTP, bytes as they are."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                path = connection.recv(65536).split()[1].decode()
                reply = replies[path]
                if not isinstance(reply, bytes):
                    text = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                    reply = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text
                connection.sendall(reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def ask(replies: dict[str, Any]) -> list[int]:
    with serving(REPLIES | replies) as url:
        client = EngineClient(url)
        client.counters()
        return client.answer(WorkloadPrompt("x", Prompt(prompt="x"), ()), [3]).tokens


CUT = b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{}"
NO_JSON = (
    "[1]",
    "{",
    "\ufeff{}",
    "[" * 3000,
    CUT,
    b"no HTTP at all",
    b"",
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
)
BROKEN: dict[str, tuple[Any, ...]] = {
    "/metrics": (
        *NO_JSON,
        f"{METRICS}vllm:generation_tokens_total NaN\n",
        f"{METRICS}vllm:generation_tokens_total +Inf\n",
        f"{METRICS}a{{b 5\n",
        f'{METRICS}{ACCEPTED}{{position="x"}} 5\n',
        f"{METRICS}{ACCEPTED} 5\n",
    ),
    "/version": NO_JSON,
    "/v1/models": (*NO_JSON, {"data": [5]}, {"data": 5}, {"data": {"a": 1}}),
    "/v1/completions": (
        *NO_JSON,
        {},
        {"choices": []},
        {"choices": [5]},
        {"choices": {}},
        {"choices": [{}]},
        *({"choices": [{"token_ids": tokens}]} for tokens in ("abc", {"a": 1}, [1.5], [-1], ["1"], [True], 5)),
        {"choices": [{"token_ids": [1], "prompt_token_ids": "abc"}]},
    ),
}


def test_what_no_engine_replies_is_one_line() -> None:
    assert ask({}) == [1, 2]
    for path, replies in BROKEN.items():
        for reply in replies:
            with pytest.raises(UserError) as caught:
                ask({path: reply})
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 600, (path, reply)


def test_the_password_of_an_address_is_masked() -> None:
    with pytest.raises(UserError, match=r"http://u:\*\*\*@127.0.0.1:1: no engine answers"):
        EngineClient("http://u:SECRET@127.0.0.1:1")
