"""Chats: messages with parts, and what a processor's chat template makes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import JsonValue

from autotune.files import Document

SET_BY_CALL = (
    "messages",
    "conversation",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
)
"""Names that are no variables of a chat template: the call that renders it sets them."""
Variables = Mapping[str, JsonValue]
"""Variables of a chat template, such as ``{"enable_thinking": False}``."""


class Part(Document):
    """A part of a message: text, or a marker for the prompt's next image or video."""

    type: Literal["text", "image", "video"]
    text: str = ""


class Message(Document):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str | list[Part]

    @property
    def parts(self) -> list[Part]:
        return [Part(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


def without_paths(message: Any, paths: dict[str, list[Any]]) -> Any:
    """A message whose parts are markers; what they hold besides is appended to ``paths``."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    content = []
    for part in parts:
        kind = str(part.get("type", "")).removesuffix("_url") if isinstance(part, dict) else ""
        held = next((part[key] for key in (kind, f"{kind}_url") if key in part), None) if kind in paths else None
        if held is None:
            content.append(part)
            continue
        paths[kind].append(held["url"] if isinstance(held, dict) and "url" in held else held)
        further = {key: value for key, value in part.items() if key not in (kind, f"{kind}_url")}
        content.append({**further, "type": kind})
    return {**message, "content": content}


def check_variables(variables: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The variables of a chat template; a ``ValueError`` for a name that the program sets itself."""
    for name in variables:
        if name in SET_BY_CALL:
            raise ValueError(f"{name!r} is not a variable of a chat template, and the program sets it; leave it out")
    return variables


def used_variables(processor: Any, variables: Variables) -> dict[str, JsonValue]:
    """The variables whose names the chat template contains."""
    names = set(re.findall(r"\w+", str(getattr(processor, "chat_template", None) or "")))
    return {name: value for name, value in variables.items() if name in names}


def chat_for(
    processor: Any, content: str | Sequence[Message], *, num_images: int, num_videos: int = 0
) -> list[dict[str, Any]]:
    """A chat as a processor's chat template reads it: as lists of parts, or as text if it reads no images."""
    if hasattr(processor, "image_processor"):
        return chat_messages(content, num_images=num_images, num_videos=num_videos)
    chat = [Message(role="user", content=content)] if isinstance(content, str) else content
    return [{"role": message.role, "content": message.text} for message in chat]


def chat_messages(content: str | Sequence[Message], *, num_images: int, num_videos: int = 0) -> list[dict[str, Any]]:
    """A chat as dictionaries whose contents are lists of parts. Markers of images and videos are placed where the
    messages say, or at the beginning of the first user message.
    """
    chat = [Message(role="user", content=content)] if isinstance(content, str) else content
    placed = {part.type for message in chat for part in message.parts}
    first: list[dict[str, str]] = []
    for kind, number in (("image", num_images), ("video", num_videos)):
        first += [{"type": kind} for _ in range(0 if kind in placed else number)]
    rendered = []
    for message in chat:
        parts = [{"type": "text", "text": p.text} if p.type == "text" else {"type": p.type} for p in message.parts]
        if message.role == "user":
            parts, first = [*first, *parts], []
        rendered.append({"role": message.role, "content": parts})
    return rendered
