"""The server answers as OpenAI's API does, with the tokens of the target alone, whatever clients do."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from autotune.cli.main import main
from autotune.errors import UserError
from autotune.runtime.decoder import Decoder
from autotune.serve.address import listen
from autotune.serve.answer_text import AnswerText
from autotune.serve.server import ApiServer
from autotune.serve.service import AnswerJob
from autotune.serve.settings import ServeSettings
from tests.sample_documents import decoding_profile
from tests.serve.servers import (
    NAME,
    begin,
    data_url,
    get,
    running,
    send,
    start_serving,
    url_of,
    wait_for,
    wait_until_ready,
)
from tests.tiny_models import Pair

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "USER: Count to ten, then stop. ASSISTANT:"
ASKED = {"prompt": TEXT, "max_tokens": 24, "temperature": 0.0}
MESSAGES = [{"role": "user", "content": "Read the digits."}]
PICTURE = Image.effect_noise((32, 32), 80).convert("RGB")


@pytest.fixture(scope="module")
def decoder(pair: Pair, processor: Any) -> Decoder:
    """With copies of the models: only the server's thread runs them."""
    tree = {"policy": "chain", "depth": 3}
    return Decoder(deepcopy(pair.target), deepcopy(pair.draft), tree=tree, processor=processor)


@pytest.fixture(scope="module")
def plain(pair: Pair, processor: Any) -> Decoder:
    """The target alone."""
    return Decoder(pair.target, processor=processor)


@pytest.fixture(scope="module")
def url(decoder: Decoder) -> Iterator[str]:
    with running(lambda: decoder, max_model_len=300) as (_, url):
        wait_until_ready(url)
        yield url


class Gate(threading.Event):
    """Decoding waits for it after each round."""

    is_reached = False


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, put = Gate(), AnswerJob.put

    def wait(job: AnswerJob, value: torch.Tensor) -> None:
        put(job, value)
        gate.is_reached = True
        assert gate.wait(600)

    monkeypatch.setattr(AnswerJob, "put", wait)
    yield gate
    gate.set()


def chat_inputs(plain: Decoder, content: list[dict[str, Any]], images: list[Image.Image] | None = None) -> Any:
    chat = [{"role": "user", "content": content}]
    text = plain.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return plain.processor(text=text, images=images, return_tensors="pt")


def new_tokens(plain: Decoder, inputs: Any, **settings: Any) -> list[int]:
    output = plain.generate(**inputs, **settings)
    tokens: list[int] = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def text_of(plain: Decoder, tokens: list[int]) -> str:
    return str(plain.processor.decode(tokens, skip_special_tokens=True))


def test_the_client_of_openai_gets_the_tokens_of_the_target(url: str, plain: Decoder) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(NAME).id == NAME

    inputs = plain.processor(text=TEXT, return_tensors="pt")
    for settings in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}):
        tokens = new_tokens(plain, inputs, max_new_tokens=24, **settings)
        ids = {"return_token_ids": True}
        whole = client.completions.create(model=NAME, prompt=TEXT, max_tokens=24, extra_body=ids, **settings)  # type: ignore[call-overload]
        assert whole.choices[0].token_ids == tokens and whole.choices[0].text == text_of(plain, tokens)
        assert whole.choices[0].finish_reason == ("length" if len(tokens) == 24 else "stop")
        assert (
            whole.usage.completion_tokens == len(tokens) and whole.usage.prompt_tokens == inputs["input_ids"].shape[1]
        )
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = client.completions.create(model=NAME, prompt=TEXT, max_tokens=24, **options, **settings)  # type: ignore[call-overload]
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
        assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason and last.usage == whole.usage
    ids = inputs["input_ids"][0].tolist()
    again = client.completions.create(model=NAME, prompt=ids, max_tokens=5, temperature=0.0)
    assert again.choices[0].text == text_of(plain, new_tokens(plain, inputs, max_new_tokens=5, temperature=0.0))

    content: list[Any] = [
        {"type": "image_url", "image_url": {"url": data_url(PICTURE)}},
        {"type": "text", "text": "What?"},
    ]
    tokens = new_tokens(
        plain, chat_inputs(plain, [{"type": "image"}, content[1]], [PICTURE]), max_new_tokens=20, temperature=0.0
    )
    asked: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": content}], "temperature": 0.0}
    answer = client.chat.completions.create(**asked, max_completion_tokens=20)
    assert answer.choices[0].message.content == text_of(plain, tokens) and answer.usage.completion_tokens == len(tokens)
    chunks = list(client.chat.completions.create(**asked, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason is not None
    message = answer.choices[0].message.model_dump()  # with nulls, as clients send answers back
    asked["messages"] += [message, {"role": "user", "content": "Why?"}]
    assert client.chat.completions.create(**asked, max_tokens=3).usage.completion_tokens <= 3
    whole_context = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    assert whole_context.usage.total_tokens == model.max_model_len
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="x", n=2)
    assert refused.value.param == "n"


def test_stop_strings_end_the_text_before_them(url: str, plain: Decoder) -> None:
    inputs = plain.processor(text=TEXT, return_tensors="pt")
    tokens = new_tokens(plain, inputs, max_new_tokens=24, temperature=0.0)
    text = text_of(plain, tokens)
    words = re.findall("[^\N{REPLACEMENT CHARACTER}]+", text)  # the random model emits halves of characters too
    for stop in (words[0], words[-1], words[len(words) // 2][0]):
        num_tokens = next(n for n in range(1, 25) if stop in text_of(plain, tokens[:n]))
        assert tokens[:num_tokens] == new_tokens(plain, inputs, max_new_tokens=24, temperature=0.0, stop_strings=[stop])
        for stream in (False, True):
            asked = {**ASKED, "stop": [stop, "never"], "stream": stream, "return_token_ids": True}
            answer = send(url, COMPLETIONS, asked)[1]
            lines = [json.loads(event[6:]) for event in answer.split("\n\n")[:-2]] if stream else [answer]
            choices = [line["choices"][0] for line in lines]
            assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
            assert [token for choice in choices for token in choice["token_ids"]] == tokens[:num_tokens]
            assert choices[-1]["finish_reason"] == "stop"
    assert send(url, COMPLETIONS, {**ASKED, "stop": "never"})[1]["choices"][0]["text"] == text


def test_a_stop_that_is_a_special_token_ends_the_answer(pair: Pair, processor: Any) -> None:
    """Texts do not show special tokens. The third token of the answer is made one here."""
    tokenizer = deepcopy(processor.tokenizer)
    decoder = Decoder(deepcopy(pair.target), processor=tokenizer)
    tokens = new_tokens(decoder, tokenizer(TEXT, return_tensors="pt"), max_new_tokens=8, temperature=0.0)
    name = tokenizer.convert_ids_to_tokens(tokens[2])
    assert tokens[2] not in tokens[:2]
    tokenizer.add_special_tokens({"extra_special_tokens": [name]}, replace_extra_special_tokens=False)
    asked = {**ASKED, "max_tokens": 8, "return_token_ids": True}
    with running(lambda: decoder) as (_, url):
        wait_until_ready(url)
        for change, num_tokens in (
            ({"stop": [name]}, 3),
            ({"stop_token_ids": [tokens[2]]}, 3),
            ({"stop_token_ids": [tokens[1]]}, 2),  # an ordinary token
            ({"stop": [name], "min_tokens": 8, "ignore_eos": True}, 8),
        ):
            choice = send(url, COMPLETIONS, asked | change)[1]["choices"][0]
            assert len(choice["token_ids"]) == num_tokens, change
            if num_tokens < 8:
                assert choice["token_ids"] == tokens[:num_tokens] and choice["finish_reason"] == "stop"
                assert choice["text"] == tokenizer.decode(tokens[: num_tokens - 1], skip_special_tokens=True)
        shown = send(url, COMPLETIONS, {**asked, "skip_special_tokens": False})[1]["choices"][0]
        assert shown["text"] == tokenizer.decode(shown["token_ids"])
        assert "holds a special token" in send(url, COMPLETIONS, {**asked, "stop": [f"{name}!"]})[1]["error"]["message"]


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def test_text_comes_in_whole_characters_and_without_what_may_begin_a_stop_string() -> None:
    text, taken = AnswerText(Letters(), b"USER: a", ["end", "\u20ac"]), []
    prompt = list(b"USER: a")
    for number in range(1, 1 + len(answer := "e\u00e9 en e\u20ac".encode())):
        text(torch.tensor([[*prompt, *answer[:number]]]), None)
        taken.append(text.take())
    assert taken == ["", "", "e\u00e9", " ", "", "", "en ", "", "", "", "e"] and text.is_stopped
    half = AnswerText(Letters(), b"")
    half.read("x\u20ac".encode()[:-1])
    assert half.take() == "" and half.take(is_last=True) == "x\N{REPLACEMENT CHARACTER}"


def test_the_form_of_guidellm(url: str) -> None:
    """Each event has the numbers of tokens so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**ASKED, "stop": None, "ignore_eos": True, "stream": True, "stream_options": options}
    status, text, _ = send(url, COMPLETIONS, asked)
    usages = [json.loads(event[6:])["usage"] for event in text.strip().split("\n\n")[:-1]]
    counts = [usage["completion_tokens"] for usage in usages]
    assert status == 200 and counts == sorted(counts) and 0 < counts[0] < counts[-1] == 24
    assert all(usage["total_tokens"] - usage["completion_tokens"] == usages[-1]["prompt_tokens"] for usage in usages)


WIDE = Image.new("RGB", (5000, 1))
BOMB = Image.new("1", (8000, 8000))


def with_image(address: str) -> dict[str, Any]:
    content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": address}}]
    return {"messages": [{"role": "user", "content": content}]}


# Changes of a right request, with the parameter or a part of the message.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((COMPLETIONS, {"max_tokens": value}, "max_tokens") for value in (0, -5, 1.5, "8", True, [])),
    *((COMPLETIONS, {"max_tokens": value}, "at most") for value in (10**6, 2**31 - 1)),
    *((COMPLETIONS, {"temperature": value}, "temperature") for value in (-1, "x", True)),
    *((COMPLETIONS, {"top_p": value}, "top_p") for value in (0, 1.5, "x")),
    *(
        (COMPLETIONS, {name: value}, name)
        for name, value in (("n", 2), ("best_of", 3), ("logprobs", 0), ("echo", True))
    ),
    *(
        (COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias"),
        (COMPLETIONS, {"frequency_penalty": 0.1}, "frequency_penalty"),
    ),
    *((COMPLETIONS, {"seed": value}, "seed") for value in (1.5, "x", 2**64)),
    *((COMPLETIONS, {"stop": value}, "stop") for value in ([""], "", 5, ["x"] * 40, [["x"]])),
    *((COMPLETIONS, {"prompt": value}, "prompt") for value in (None, 5, {}, ["x"], [5, -1], [0.5], [10**6], [2**70])),
    *((COMPLETIONS, {"prompt": value}, "") for value in ("", [], "<image> What?", "x " * 40_000, "x" * 2_000_000)),
    *((COMPLETIONS, {name: value}, name) for name, value in (("stream", "yes"), ("colour", 1), ("model", 5))),
    *(
        (CHAT, {"messages": value}, "messages")
        for value in (None, [], "x", [5], [{"role": "user"}], [{"content": "x"}])
    ),
    *((CHAT, {"messages": [{"role": role, "content": "x"}]}, "") for role in ("tool", "assistant", 5)),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "<image> What?"}]}, "<image>"),
    *(
        (CHAT, {name: value}, name)
        for name, value in (("logprobs", True), ("top_logprobs", 3), ("tools", [{}]), ("min_p", 1.1))
    ),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    *(
        (CHAT, with_image(address), "image 1")
        for address in ("https://x.example/a.png", "file:///etc/passwd", "data:,x")
    ),
    *((CHAT, with_image(f"data:image/png;base64,{data}"), "not a readable image") for data in ("???", "aGVsbG8=", "")),
    (CHAT, with_image(data_url(PICTURE)[:-200]), "not a readable image"),
    *((CHAT, with_image(data_url(image)), "pixels") for image in (WIDE, BOMB)),
    (CHAT, with_image(data_url(PICTURE, "BMP")), "not a readable image"),
]
BODIES = (
    b"",
    b"{",
    b"[]",
    b"5",
    b"\xff",
    b'{"prompt": "x", "prompt": "y"}',
    b'{"prompt": "\\ud800"}',
    b'{"temperature": NaN}',
    b"[" * 5000,
)


def check_error(status: int, content: Any) -> dict[str, Any]:
    """An error of the client, in OpenAI's form."""
    assert 400 <= status < 500 and content.keys() == {"error"}, (status, content)
    error: dict[str, Any] = content["error"]
    assert error.keys() == {"message", "type", "param", "code"} and "\n" not in error["message"]
    return error


def test_what_a_client_does_wrong_is_an_error_of_the_client(url: str) -> None:
    for path, change, part in WRONG:
        for stream in (False, True):
            whole = {**(ASKED if path == COMPLETIONS else {"messages": MESSAGES, "max_tokens": 3}), "stream": stream}
            status, content, _ = send(url, path, whole | change)
            error = check_error(status, content)
            assert part in (error["param"] or "") or part in error["message"], (change, error)
    for body in BODIES:
        assert check_error(*send(url, COMPLETIONS, body)[:2])
    for path, body, headers, expected in (
        (COMPLETIONS, ASKED, {"Content-Type": "text/plain"}, 415),
        (COMPLETIONS, b"", {"Content-Length": str(1 << 40)}, 413),
        (COMPLETIONS, b" " * (33 << 20), {}, 413),
        (COMPLETIONS, None, {}, 405),
        ("/v2", ASKED, {}, 404),
        ("/v1/models/other", None, {}, 404),
        (COMPLETIONS, ASKED, {"Host": "example.com"}, 403),
        (COMPLETIONS, ASKED, {"Host": "[::"}, 403),
    ):
        status, content, _ = send(url, path, body, headers)
        assert status == expected and check_error(status, content)
    neutral = {"n": 1, "logprobs": False, "user": "x", "frequency_penalty": 0.0, "tools": None, "logit_bias": {}}
    assert send(url, COMPLETIONS, ASKED | neutral)[0] == 200


def test_a_full_queue_is_said_at_once(decoder: Decoder, gate: Gate) -> None:
    with running(lambda: decoder, max_waiting=1) as (server, url):
        wait_until_ready(url)
        open_ones = [begin(url, COMPLETIONS, ASKED) for _ in range(2)]
        wait_for(lambda: len(server.service.open) == 2)
        status, content, headers = send(url, COMPLETIONS, ASKED)
        assert status == 429 and check_error(status, content)["code"] == "queue_full" and headers["retry-after"] == "1"
        gate.set()
        answers = [json.loads(connection.getresponse().read())["choices"][0]["text"] for connection in open_ones]
        assert answers[0] == answers[1] == send(url, COMPLETIONS, ASKED)[1]["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_the_decoder(decoder: Decoder, gate: Gate, stream: bool) -> None:
    """The running request stops after its round; one that waits is never begun."""
    with running(lambda: decoder) as (server, url):
        wait_until_ready(url)
        outcomes: list[tuple[int, bool]] = []
        decoder.observers.append(lambda stats, *, is_finished: outcomes.append((stats.new_tokens, is_finished)))
        clients = [begin(url, COMPLETIONS, {**ASKED, "max_tokens": 1000, "stream": stream}) for _ in range(2)]
        wait_for(lambda: len(server.service.open) == 2 and gate.is_reached)
        for client in clients:
            client.close()
        wait_for(lambda: not server.service.open)
        gate.set()
        assert send(url, COMPLETIONS, ASKED)[0] == 200
        assert len(outcomes) == 2 and outcomes[0][0] < 10 and [done for _, done in outcomes] == [False, True]
        decoder.observers.pop()
        assert 'autotune_requests_total{outcome="stopped"} 1.0' in get(url, "/metrics")[1]


@pytest.mark.parametrize(("drain_s", "number"), [(3600.0, signal.SIGTERM), (0.2, signal.SIGTERM), (0.2, signal.SIGHUP)])
def test_a_signal_lets_accepted_requests_end(
    decoder: Decoder, gate: Gate, drain_s: float, number: signal.Signals
) -> None:
    with running(lambda: decoder, drain_s=drain_s) as (server, url):
        wait_until_ready(url)
        connection = begin(url, COMPLETIONS, ASKED)
        wait_for(lambda: server.service.open)
        server.handle_exit(number, None)
        if drain_s > 1:
            assert get(url, "/health") == (503, {"status": "draining", "open_requests": 1})
            assert send(url, COMPLETIONS, ASKED)[0] == 503
            gate.set()
        response = connection.getresponse()
        error = json.loads(response.read())
        gate.set()
    assert (response.status, server.exit_code) == ((200, 0) if drain_s > 1 else (503, 128 + number)), error  # type: ignore[attr-defined]


def test_health_tells_the_truth(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, generate = threading.Event(), Decoder.generate
    errors: list[Exception] = []

    def fail(decoder: Decoder, **inputs: Any) -> Any:
        if errors:
            raise errors.pop()
        return generate(decoder, **inputs)

    def load() -> Decoder:
        loaded.wait(600)
        return decoder

    monkeypatch.setattr(Decoder, "generate", fail)
    with running(load) as (_, url):
        assert get(url, "/health") == (503, {"status": "loading", "open_requests": 0})
        assert send(url, COMPLETIONS, ASKED)[0] == send(url, "/v1/models", None)[0] == 503
        loaded.set()
        wait_until_ready(url)
        errors.append(RuntimeError("once"))
        status, content, _ = send(url, COMPLETIONS, ASKED)
        assert status == 500 and content["error"]["message"].startswith("the decoder failed (RuntimeError)")
        assert get(url, "/health")[0] == 200 and send(url, COMPLETIONS, ASKED)[0] == 200
        errors += [RuntimeError("again"), RuntimeError("at first")]
        assert send(url, COMPLETIONS, ASKED)[0] == 500
        assert get(url, "/health") == (503, {"status": "broken", "open_requests": 0})
        assert send(url, COMPLETIONS, ASKED)[1]["error"]["code"] == "broken"


def test_a_key_is_asked_for_by_all_but_health(decoder: Decoder) -> None:
    with running(lambda: decoder, api_key="s\u00e9cret") as (_, url):
        wait_until_ready(url)
        for key in ("", "Bearer ", "Bearer s\u00e9cre", "s\u00e9cret"):
            headers = {"Authorization": key.encode().decode("latin-1")}
            status, content, _ = send(url, COMPLETIONS, ASKED, headers)
            assert status == 401 and check_error(status, content)["code"] == "invalid_api_key"
        assert get(url, "/metrics")[0] == 401
        right = "Bearer s\u00e9cret".encode().decode("latin-1")
        assert get(url, "/metrics", Authorization=right, Host="example.com")[0] == 200


def test_a_profile_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> Decoder:
        raise UserError("no such model")

    settings = ServeSettings(port=0)
    with pytest.raises(UserError, match="no such model"):
        ApiServer(load, settings, lambda _: None).answer_until_signal(listen(settings)[0])


def test_without_the_extra_packages_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding_profile().save(tmp_path / "profile.json")
    monkeypatch.delitem(sys.modules, "autotune.serve.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = CliRunner().invoke(main, ["serve", str(tmp_path / "profile.json")])
    needed = "uvicorn is not installed; this needs the extra serve: pip install 'autotune-speculative[serve]'\n"
    assert said.exit_code == 2 and said.stderr.endswith(f"\nautotune: {needed}")


HANGUP = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="run by nohup, which is obeyed")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=HANGUP)])
def test_the_command_answers_what_it_accepted_before_a_signal_and_ends_with_0(
    number: signal.Signals, pair: Pair, tmp_path: Path
) -> None:
    process, log = start_serving(pair, tmp_path)
    try:
        url = url_of(process, log)
        assert get(url, "/v1/models")[1]["data"][0]["id"] == "target"
        connection = begin(url, COMPLETIONS, {**ASKED, "max_tokens": 200})
        wait_for(lambda: get(url, "/health")[1]["open_requests"])
        assert process.pid is not None
        os.kill(process.pid, number)
        response = connection.getresponse()
        assert response.status == 200 and json.loads(response.read())["usage"]["completion_tokens"] > 0
        process.join(60)
        assert process.exitcode == 0, log.with_suffix(".err").read_text()
    finally:
        process.kill()
