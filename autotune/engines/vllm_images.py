"""Requests of vLLM for prompts with images. A prompt of text is sent as its tokens, to ``/v1/completions``; one with
images as a chat, to ``/v1/chat/completions``, because tokens hold no pixels. Loads no torch.
"""

from __future__ import annotations

from typing import Any

from autotune.engines.engine_server import text_chat
from autotune.workloads.chat import chat_messages
from autotune.workloads.pixels import png_url
from autotune.workloads.prompt import WorkloadPrompt

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Request = dict[str, Any]
"""The part of a request's body that says what is decoded: ``prompt``, or ``messages`` with the images."""


def chat_request(prompt: WorkloadPrompt) -> Request:
    """A prompt as a chat of OpenAI's API, with its images as data URLs of PNG files, which keep every pixel."""
    if not prompt.images:
        return text_chat(prompt)
    messages = chat_messages(prompt.content, num_images=len(prompt.images))
    urls = map(png_url, prompt.images)
    for message in messages:
        message["content"] = [
            {"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part
            for part in message["content"]
        ]
    options = {
        "chat_template_kwargs": prompt.settings.chat_template_kwargs,
        "mm_processor_kwargs": prompt.settings.model_dump(include={"min_pixels", "max_pixels"}, exclude_none=True),
    }
    return {"messages": messages, **{name: value for name, value in options.items() if value}}


def request_of(tokens: list[int], prompt: WorkloadPrompt | None = None) -> Request:
    """The request for the answer to a prompt of these tokens: ``prompt`` has its images, if any."""
    return chat_request(prompt) if prompt is not None and prompt.images else {"prompt": tokens}


def path_of(request: Request) -> str:
    return COMPLETIONS if "prompt" in request else CHAT
