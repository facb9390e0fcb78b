"""Requests as clients send them: what changes no answer is accepted, what would change one is refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from transformers import GenerationConfig

from autotune.serve.requests import ApiError, ChatRequest, CompletionRequest, parse_request
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.serve.servers import data_url

USER: dict[str, Any] = {"role": "user", "content": "Why?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "So."}
PICTURE = {"type": "image_url", "image_url": {"url": data_url(Image.new("RGB", (8, 8)))}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def chat(*messages: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"messages": [*messages], **body}


def with_parts(*parts: dict[str, Any]) -> dict[str, Any]:
    return chat({"role": "user", "content": [*parts]})


# The bodies that clients make, as their sources have them, by the client.
BODIES: dict[str, dict[str, Any]] = {
    "guidellm 0.8, completions": {
        **{"prompt": "x", "max_tokens": 8, "stop": None, "ignore_eos": True, "stream": True},
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "guidellm 0.8, chat": with_parts({"type": "text", "text": "x"}, PICTURE)
    | {"max_completion_tokens": 8, "stop": None, "ignore_eos": True, **USAGE},
    "vllm bench serve, openai": {
        **{"prompt": "x", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "ignore_eos": True, **USAGE},
        **{"temperature": 0.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    },
    "vllm bench serve, openai-chat": with_parts({"type": "text", "text": "x"}) | {"max_completion_tokens": 8, **USAGE},
    "vllm's defaults": chat(
        USER,
        **{"use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False},
        **{"min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True, "priority": 0},
        **{"truncate_prompt_tokens": None, "prompt_logprobs": None, "bad_words": [], "echo": False, "tools": None},
        **{"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
        **{"documents": None, "structured_outputs": None, "request_id": "1", "cache_salt": "x", "vllm_xargs": None},
        **{"tool_choice": "none", "include_reasoning": True, "parallel_tool_calls": True, "top_logprobs": 0},
    ),
    "openai's client": chat(
        {**USER, "name": "ann"},
        {**ANSWER, "annotations": [], "audio": None, "tool_calls": [], "refusal": None, "function_call": None},
        USER,
        **{"n": 1, "logprobs": False, "response_format": {"type": "text"}, "tool_choice": "auto", "user": "ann"},
        **{
            "store": False,
            "service_tier": "auto",
            "verbosity": "medium",
            "modalities": ["text"],
            "metadata": {"a": "b"},
        },
    ),
    "llm": chat({"role": "system", "content": "Be short."}, USER, **{"temperature": 0.5, "seed": 1, **USAGE}),
    "llm with an attachment": with_parts(
        {"type": "text", "text": "x"}, {**PICTURE, "image_url": {**PICTURE["image_url"], "detail": "low"}}
    ),
    "lm-evaluation-harness": chat(USER, max_tokens=8, temperature=0, stop=["\n\n"], seed=1234),
    "evalscope": chat(USER, min_tokens=8, max_tokens=8, n=1, stop_token_ids=[7], repetition_penalty=1.0, **USAGE),
    "aiperf": with_parts({"type": "text", "text": "x"}, {**PICTURE, "uuid": "1"})
    | {"max_completion_tokens": 8, **USAGE},
    "inference-perf": chat(USER, {**ANSWER, "reasoning_content": "Hm.", "reasoning": "Hm."}, USER, ignore_eos=True),
    "litellm": chat({**USER, "cache_control": {}}, {**ANSWER, "provider_specific_fields": {"refusal": None}}, USER),
    "an answer without text": chat(USER, {"role": "assistant", "content": None}, {**USER, "role": "developer"}, USER),
    "parts of the API of responses": with_parts({"type": "input_text", "text": "x"}),
}
# Values that would change the answer, or parts that are not read, with what the line names.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (chat(USER, n=True), "n: got True, which is not supported; leave n out"),
    (chat(USER, include_stop_str_in_output=True), "include_stop_str_in_output: got True"),
    (chat(USER, add_special_tokens=True), "add_special_tokens: input should be False; got True"),
    (chat(USER, tools=[{}], tool_choice="auto"), "tools: got"),
    (
        chat(USER, mm_processor_kwargs={"fps": 1}),
        "unknown key 'mm_processor_kwargs.fps'; known: max_pixels, min_pixels",
    ),
    (chat(USER, {**ANSWER, "tool_calls": [{}]}, USER), r"messages.1.tool_calls: got \[{}\]"),
    (chat({"role": "user", "content": None}), "key 'messages.0.content' is required"),
    (
        with_parts({"type": "video_url", "video_url": {}}),
        "messages.0.content.0.video_url: got {}, which is not supported",
    ),
    (with_parts({"type": "picture"}), "messages.0.content.0.type: input should be .* got 'picture'"),
    (chat(USER, images=["/etc/passwd"]), "images: got .*, which is not supported"),
    (with_parts({"type": "image_url", "image_url": {"url": "x", "detail": 5}}), "content.0.image_url.detail: got 5"),
    (chat({"role": "user", "content": 5}), "messages.0.content: input should be a valid string; got 5"),
    (chat(USER, stop=[5]), "stop.0: input should be a valid string; got 5"),
    (chat(USER, stream=True, stream_options={"colour": 1}), "unknown key 'stream_options.colour'"),
]


def parsed(body: dict[str, Any]) -> ChatRequest | CompletionRequest:
    return parse_request(ChatRequest if "messages" in body else CompletionRequest, json.dumps(body).encode())


@pytest.mark.parametrize("client", BODIES)
def test_the_bodies_of_clients_are_accepted(client: str) -> None:
    asked = parsed(BODIES[client])
    assert not isinstance(asked, ChatRequest) or asked.messages[-1].parts


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as error:
        parsed(body)
    assert error.value.content["error"]["param"] in body


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {}),
        ({"temperature": 1.5}, {"temperature": 1.5, "top_k": 5, "top_p": 0.9}),
        ({"temperature": 1.5, "top_k": -1}, {"temperature": 1.5, "top_k": 0, "top_p": 0.9}),
        (
            {"temperature": 1.5, "top_p": 1.0, "min_p": 0.0},
            {"temperature": 1.5, "top_k": 5, "top_p": 1.0, "min_p": 0.0},
        ),
        ({"top_k": -1}, {"top_k": 0}),
    ],
)
def test_a_request_replaces_the_settings_that_it_names(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9)
    assert parsed(chat(USER, **asked)).settings(config) == expected


@pytest.mark.parametrize(
    ("own", "asked", "ends"),
    [
        (2, {}, [2]),
        ([2, 7], {"stop_token_ids": [5, 7]}, [2, 5, 7]),
        (None, {}, []),
        (2, {"ignore_eos": True, "stop_token_ids": [5]}, [5]),
        (2, {"stop": ["<|end|>", "so"]}, [2, 9]),
        (2, {"stop": "<think>"}, [2]),
    ],
)
def test_the_tokens_that_end_an_answer(own: Any, asked: dict[str, Any], ends: list[int]) -> None:
    class Token(str):
        special = True

    class Shown(Token):
        special = False

    tokenizer = SimpleNamespace(added_tokens_decoder={9: Token("<|end|>"), 10: Shown("<think>")})
    assert parsed(chat(USER, **asked)).ends(GenerationConfig(eos_token_id=own), tokenizer) == ends


def test_variables_of_the_template_and_limits_of_pixels_are_those_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Prompt] = []
    monkeypatch.setattr(WorkloadPrompt, "inputs", lambda prompt, *_: seen.append(prompt.settings) or {})
    variables, limits = {"enable_thinking": False}, {"min_pixels": 64, "max_pixels": 128}
    parsed(chat(USER, chat_template_kwargs=variables, mm_processor_kwargs=limits)).inputs(None, "cpu")
    assert seen[0].chat_template_kwargs == variables and (seen[0].min_pixels, seen[0].max_pixels) == (64, 128)
