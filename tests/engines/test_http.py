"""Replies that no serving engine gives are one line, whatever a server sends."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import TimeoutExpired
from typing import Any
from unittest.mock import Mock

import pytest

from autotune.engines.llama_cpp import VERIFICATIONS, LlamaServer
from autotune.engines.served import Served
from autotune.engines.vllm import VllmServer
from autotune.errors import UserError
from autotune.workloads.prompt import Prompt, WorkloadPrompt

PROMPT = WorkloadPrompt("x", Prompt(prompt="x"), ())
METRICS = "vllm:generation_tokens_total 5.0\n"
PART = {"token_ids": [1, 2], "finish_reason": "length"}


def streamed(*parts: Any) -> str:
    """A reply in parts, as it is streamed."""
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"


REPLIES: dict[str, Any] = {
    "/metrics": METRICS,
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "served", "max_model_len": 64}]},
    "/tokenize": {"tokens": [3]},
    "/detokenize": {"prompt": "x"},
    "/v1/completions": streamed({"choices": [PART]}),
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
    """Ask a vLLM of fixed replies."""
    with serving(REPLIES | replies) as url:
        server = VllmServer(url)
        server.metrics()
        tokens, _ = server.stream(Served.of(server.prompt_tokens(PROMPT), [1], 2))
        assert isinstance(server.text(tokens), str)
        return tokens


LLAMA_REPLIES: dict[str, Any] = {
    "/props": {"default_generation_settings": {"n_ctx": 64}, "build_info": "b1", "model_alias": "x"},
    "/apply-template": {"prompt": "x"},
    "/tokenize": {"tokens": [3]},
    "/completion": {
        "tokens": [1, 2],
        "stop_type": "limit",
        "timings": {"predicted_ms": 2.0, "prompt_ms": 1, "draft_n": 2, "draft_n_accepted": 1},
    },
    "/metrics": f"{VERIFICATIONS} 5\n",
}


def ask_llama(replies: dict[str, Any]) -> list[int]:
    with serving(LLAMA_REPLIES | replies) as url:
        server = LlamaServer(url)
        server.process = Mock(pid=os.getpid(), wait=Mock(side_effect=TimeoutExpired("x", 1)))
        return server.ask(PROMPT).tokens


def ask_counted(replies: dict[str, Any]) -> list[int]:
    """Ask a vLLM whose replies have counts; ``counts`` in place of those that fit."""
    counts = COUNTS | replies.get("counts", {})
    last = {"choices": [], "usage": {}, "metrics": {"speculative_decoding": counts}}
    with serving(REPLIES | {"/v1/completions": streamed({"choices": [PART]}, last)}) as url:
        return list(VllmServer(url).verified([5]).draft_counts)


def test_the_cpu_time_of_an_answer_begins_at_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt takes 1000 ms of the CPU, and each of the other two parts 10 ms."""
    spent_ms, of_parts = [0.0], VllmServer.streamed

    def with_cpu(server: VllmServer, path: str, body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
        for part in of_parts(server, path, body):
            spent_ms[0] += 10.0 if spent_ms[0] else 1000.0
            yield part

    monkeypatch.setattr(VllmServer, "streamed", with_cpu)
    monkeypatch.setattr(VllmServer, "cpu_ms", lambda server: spent_ms[0])
    parts = [{"choices": [PART | {"token_ids": [token]}]} for token in (1, 2)]
    with serving(REPLIES | {"/v1/completions": streamed(*parts, {"choices": [], "usage": {}})}) as url:
        server = VllmServer(url)
        server.process = Mock(pid=os.getpid())
        assert server.verified([5]).cpu_ms == 20.0


COUNTS = {"num_spec_steps": 1, "num_draft_tokens": 3, "per_step_drafted": [3], "per_step_accepted": [1]}
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
    b"HTTP/1.0 200 OK\r\n\r\n" + '{"version": "1"}'.encode("utf-16"),
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.0 500 No\r\nContent-Length: 99999999999\r\n\r\n{",
    b"HTTP/1.0 302 No\r\nLocation: file:///etc/hostname\r\n\r\n",
    "<!DOCTYPE html><html><body>502 Bad Gateway</body></html>",
    '{"version": NaN}',
    '{"version": 1e999}',
    '{"version": ' + "9" * 5000 + "}",
    "",
    "null",
)
WRONG_TOKENS = ("abc", "12", {"a": 1}, [1.5], [-1], ["1"], [True], 5, [2**31], [10**30], [None], [[1]])
BROKEN: dict[str, tuple[Any, ...]] = {
    "/metrics": (
        *NO_JSON,
        f"{METRICS}vllm:generation_tokens_total NaN\n",
        f"{METRICS}vllm:generation_tokens_total +Inf\n",
        f"{METRICS}vllm:spec_decode_num_accepted_tokens_total x\n",
        f"{METRICS}vllm:generation_tokens_total -7\n",
        f"{METRICS}vllm:generation_tokens_total 1e300\n",
        f'{METRICS}vllm:spec_decode_num_drafts_total{{engine="0"}} -1\n',
    ),
    "/version": (*NO_JSON, {}, {"version": 1}, {"version": None}, {"version": ["0.32.0"]}),
    "/v1/models": (*NO_JSON, *({"data": data} for data in ([5], 5, {"a": 1}, [], [{}], [{"id": 5}], None))),
}
LLAMA_ANSWER = LLAMA_REPLIES["/completion"]
LLAMA_BROKEN: dict[str, tuple[Any, ...]] = {
    "/props": (
        *NO_JSON,
        {},
        {"default_generation_settings": 5},
        *({"default_generation_settings": {"n_ctx": size}} for size in (None, "64", 1.5, True, -1, 2**40)),
    ),
    "/apply-template": (*NO_JSON, {}, {"prompt": None}, {"prompt": 5}, {"prompt": ["x"]}),
    "/tokenize": (*NO_JSON, {}, *({"tokens": tokens} for tokens in WRONG_TOKENS)),
    "/completion": (
        *NO_JSON,
        *({key: value for key, value in LLAMA_ANSWER.items() if key != name} for name in LLAMA_ANSWER),
        *(LLAMA_ANSWER | {"tokens": tokens} for tokens in (*WRONG_TOKENS, [], [1] * 1000)),
        *(LLAMA_ANSWER | {"timings": timings} for timings in (None, 5, [], {}, {"predicted_ms": 2.0})),
        *(
            LLAMA_ANSWER | {"timings": LLAMA_ANSWER["timings"] | {name: value}}
            for name in LLAMA_ANSWER["timings"]
            for value in ("2", "nan", None, True, -1, [1])
        ),
        LLAMA_ANSWER | {"timings": LLAMA_ANSWER["timings"] | {"draft_n_accepted": 3}},
    ),
    "/metrics": tuple(
        f"llamacpp:spec_decode_num_drafts_total {value}\n" for value in ("x", "NaN", "+Inf", "-1", "1e300", "1_0x")
    ),
}
BROKEN |= {
    "/v1/models": (
        *BROKEN["/v1/models"],
        *({"data": [{"id": "served", "max_model_len": size}]} for size in (None, "64", 1.5, -1, 2**40)),
    ),
    "/tokenize": LLAMA_BROKEN["/tokenize"],
    "/detokenize": (*NO_JSON, {}, {"prompt": None}, {"prompt": 5}),
    "/v1/completions": (
        CUT,
        *(
            streamed(part)
            for part in ({}, {"choices": []}, {"choices": [5]}, {"choices": [PART, PART]}, {"error": "x"})
        ),
        *(streamed({"choices": [PART | {"token_ids": tokens}]}) for tokens in WRONG_TOKENS),
    ),
}
CASES = [(ask, path, reply) for path, replies in BROKEN.items() for reply in replies]
CASES += [
    (ask_counted, "counts", {name: value})
    for name in COUNTS
    for value in (None, "1", 2, -1, True, [2], ["3"], [-1], [3, 3], [4], {"a": 1})
    if value != COUNTS[name] and (name, value) != ("per_step_accepted", [2])
]
CASES += [(ask_llama, path, reply) for path, replies in LLAMA_BROKEN.items() for reply in replies]


def test_what_no_engine_replies_is_one_line_with_the_address_and_the_rule() -> None:
    assert ask_llama({}) == ask({}) == [1, 2] and ask_counted({}) == [1, 3, 1]
    for send, path, reply in CASES:
        with pytest.raises(UserError, match=r"http://127.0.0.1:\d+.*; .+") as caught:
            send({path: reply})
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600, (path, reply)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_an_engine_of_this_machine_is_asked_without_a_proxy(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    ask({})


def test_an_engine_elsewhere_is_asked_by_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(UserError, match=r"no engine answers .*Connection refused"):
        VllmServer("http://engine.example:8000")


def test_an_endless_reply_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.engines.engine_server.MOST_BYTES", 100)
    with pytest.raises(UserError, match=r"no engine answers .its reply is longer than 100 bytes"):
        ask({"/metrics": b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 101})


@pytest.mark.parametrize("address", ["file:///etc", "localhost:8000", "data:,x", "ftp://x", "", "http://", "http://["])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"begins with http:// or https://|no engine answers"):
        VllmServer(address)
