"""Requests in the form of OpenAI's API: what a client may ask, and the prompt and settings of it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from autotune.errors import UserError, reading
from autotune.files import Document, describe
from autotune.strict_parsing import parse_json
from autotune.workloads.chat import Message, Variables, without_paths
from autotune.workloads.pixels import as_shown
from autotune.workloads.prompt import Prompt, WorkloadPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 25  # of all images of a request
MAX_ASPECT = 20  # some processors scale an image's shorter side up
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_STOPS = 16
TEXTS = ("input_text", "output_text")  # types of parts in the API of responses
ANY = "any value"
# Keys of clients that are not supported, by the place where they stand, with the values at which they change no answer.
# A null changes none. ANY is of keys that never change one.
NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {
        **dict.fromkeys(("n", "best_of", "length_penalty"), (1,)),
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "priority"), (0,)),
        **dict.fromkeys(("echo", "logprobs", "use_beam_search", "include_stop_str_in_output"), (False,)),
        **dict.fromkeys(("continue_final_message", "return_prompt_text", "watermarking"), (False,)),
        **dict.fromkeys(("add_generation_prompt", "include_reasoning"), (True,)),
        **dict.fromkeys(("tools", "functions", "documents", "bad_words"), ([],)),
        **dict.fromkeys(("logit_bias", "media_io_kwargs", "vllm_xargs"), ({},)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        **{"suffix": ("",), "response_format": ({"type": "text"},), "modalities": (["text"],)},
        **{"reasoning_effort": ("none",), "verbosity": ("medium",), "thinking_token_budget": (-1,)},
        **dict.fromkeys(("prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "truncate_prompt_tokens"), ()),
        **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
        **dict.fromkeys(("chat_template", "repetition_detection", "web_search_options", "audio", "images"), ()),
        **dict.fromkeys(("user", "store", "service_tier", "safety_identifier", "prediction", "moderation"), (ANY,)),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt"), (ANY,)),
        **dict.fromkeys(("request_id", "session_id", "stream_interval", "return_tokens_as_token_ids"), (ANY,)),
        **dict.fromkeys(("parallel_tool_calls", "spaces_between_special_tokens", "cache_prompt", "metadata"), (ANY,)),
    },
    "stream_options": {"include_obfuscation": (ANY,)},
    "messages": {
        **dict.fromkeys(("tool_calls", "images", "thinking_blocks"), ([],)),
        **{"refusal": ("",), "function_call": (), "tool_call_id": (), "audio": (), "prefix": (False,)},
        **dict.fromkeys(("name", "reasoning", "reasoning_content", "annotations"), (ANY,)),
        **dict.fromkeys(("id", "cache_control", "provider_specific_fields"), (ANY,)),
    },
    "messages.content": {
        **dict.fromkeys(("cache_control", "prompt_cache_breakpoint", "uuid", "annotations"), (ANY,)),
        **dict.fromkeys(("video_url", "video", "input_audio", "audio_url", "file"), ()),
    },
    "messages.content.image_url": {"detail": ("auto", "low", "high", "original"), "format": (ANY,)},
}


class ApiError(Exception):
    """A request that is not answered: the status, and what OpenAI's API says about it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_s: int = 0
    ) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status, self.headers = status, {"Retry-After": str(retry_s)} if retry_s else {}
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(Document):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class PixelLimits(Document):
    """Keyword arguments of the image processor."""

    min_pixels: int | None = Field(default=None, ge=1)
    max_pixels: int | None = Field(default=None, ge=1)


class Generation(Document):
    """The parameters of completions and of chats. Settings that are left out are those of the model's generation
    config.
    """

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """0 and -1 keep every token."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, lt=2**31)
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def ends(self, config: Any, tokenizer: Any) -> list[int]:
        """The tokens that end the answer: those of the model's generation config and of the request, and stops that are
        a special token, which the text of an answer does not show.
        """
        ends = [] if self.ignore_eos or config.eos_token_id is None else config.eos_token_id
        known = tokenizer.added_tokens_decoder if self.stops else {}
        special = {str(token): number for number, token in known.items() if token.special}
        hidden = [stop for stop in self.stops if stop not in special and any(name in stop for name in special)]
        if hidden and self.skip_special_tokens:
            raise UserError(f"stop: {hidden[0]!r:.60} holds a special token, which texts do not show; give it alone")
        stops = [special[stop] for stop in self.stops if stop in special]
        return sorted({*(ends if isinstance(ends, list) else [ends]), *self.stop_token_ids, *stops})

    def settings(self, config: Any) -> dict[str, Any]:
        """Arguments of ``Decoder.generate``, but for lengths, ends and the seed. What the request leaves out is left to
        the model's generation config, also beside a temperature.
        """
        names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
        asked = self.model_dump(include=names, exclude_none=True)
        if self.temperature is not None:  # which would set those of the config aside
            asked = {name: value for name in ("top_p", "top_k") if (value := getattr(config, name)) is not None} | asked
        if "top_k" in asked:
            asked["top_k"] = max(asked["top_k"], 0)
        return asked


class CompletionRequest(Generation):
    """A text that the model continues, without the chat template; or its tokens."""

    prompt: str | list[Annotated[int, Field(ge=0, lt=2**31)]]
    max_tokens: int | None = Field(default=16, ge=1, lt=2**31)  # OpenAI's default
    add_special_tokens: Literal[True] = True

    @property
    def num_characters(self) -> int:
        return len(self.prompt)

    def inputs(self, processor: Any, device: Any, variables: Variables = MappingProxyType({})) -> dict[str, Any]:
        """Inputs of the target, without a chat template; a ``UserError`` if there can be none."""
        import torch

        if isinstance(self.prompt, list):
            tokens = torch.tensor([self.prompt], dtype=torch.long, device=device)
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        with reading("prompt: the processor refuses it", "change the text"):  # such as image tokens in the text
            return dict(processor(text=self.prompt, return_tensors="pt").to(device))


class ChatRequest(Generation):
    messages: list[Message] = Field(min_length=1)
    images: list[Any] = Field(default_factory=list)
    """The URLs in the messages."""
    add_special_tokens: Literal[False] = False
    """The chat template writes them."""
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: PixelLimits = PixelLimits()

    @property
    def num_characters(self) -> int:
        return sum(len(part.text) for message in self.messages for part in message.parts)

    def inputs(self, processor: Any, device: Any, variables: Variables = MappingProxyType({})) -> dict[str, Any]:
        marked = ["data"] * len(self.images)
        settings = {**self.mm_processor_kwargs.model_dump(), "chat_template_kwargs": self.chat_template_kwargs}
        with reading("messages: not a chat", "change them"):
            chat = Prompt(messages=self.messages, images=marked, **settings)
        prompt = WorkloadPrompt("messages", chat, tuple(read_images([*map(str, self.images)])))
        return prompt.with_variables(variables).inputs(processor, device)


def parse_request(kind: type[CompletionRequest | ChatRequest], body: bytes) -> CompletionRequest | ChatRequest:
    """A request from its body; an ``ApiError`` if it is none, or asks for what would give another answer than this
    server's.
    """
    try:
        content = parse_json(body.decode())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON ({error}); send a JSON object") from None
    if not isinstance(content, dict):
        raise ApiError(400, f"the body is a JSON object; got {type(content).__name__}; send an object")
    content = _without_neutral(content)
    if kind is ChatRequest and isinstance(messages := content.get("messages"), list):
        images: list[Any] = []
        chat = [_as_chat(message, images) for message in messages]
        content |= {"messages": chat, "images": images}
    if (limit := content.pop("max_completion_tokens", None)) is not None:  # the later name
        content["max_tokens"] = limit
    try:
        asked = kind.model_validate(content)
    except ValidationError as error:
        location = error.errors()[0]["loc"]
        raise ApiError(400, describe(error, kind), param=str(location[0]) if location else None) from None
    if "" in asked.stops or len(asked.stops) > MAX_STOPS:
        raise ApiError(400, f"stop: at most {MAX_STOPS} texts, none of them empty; change them", param="stop")
    return asked


def _as_chat(message: Any, images: list[Any]) -> Any:
    """A message as workloads have it: parts with images are markers, and what they hold is appended to ``images``."""
    if not isinstance(message, dict):
        return message
    renamed = {"content": "", **message} if message.get("role") == "assistant" else {**message}
    if message.get("role") == "developer":
        renamed["role"] = "system"
    if isinstance(parts := message.get("content"), list):
        is_text = [isinstance(part, dict) and part.get("type") in TEXTS for part in parts]
        renamed["content"] = [
            {**part, "type": "text"} if text else part for part, text in zip(parts, is_text, strict=True)
        ]
    return without_paths(renamed, {"image": images})


def _without_neutral(content: dict[str, Any], place: str = "", where: str = "") -> dict[str, Any]:
    """The keys of an object that can change an answer, also of the objects in it.

    Args:
        place: where the object stands, as ``NEUTRAL`` has it.
        where: the same, with the numbers of entries.

    Raises:
        ApiError: a key that is not supported has a value that would change the answer.
    """
    asked = {}
    for name, value in content.items():
        inner, at = (f"{path}.{name}".removeprefix(".") for path in (place, where))
        neutral = NEUTRAL[place].get(name)
        if value is None or (neutral is not None and _is_neutral(value, neutral)):
            continue
        if neutral is not None:
            advice = f"which is not supported; leave {name} out"
            raise ApiError(400, f"{at}: got {value!r:.60}, {advice}", param=at.partition(".")[0])
        if isinstance(value, dict) and inner in NEUTRAL:
            value = _without_neutral(value, inner, at)
        elif isinstance(value, list) and inner in NEUTRAL:
            value = [
                _without_neutral(entry, inner, f"{at}.{number}") if isinstance(entry, dict) else entry
                for number, entry in enumerate(value)
            ]
        asked[name] = value
    return asked


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is neutral. True is not 1, and False is not 0."""
    return ANY in neutral or any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral
    )


def read_images(urls: Sequence[str]) -> list[Image]:
    """The images in data URLs as RGB. Their sizes are checked before they are decoded."""
    from PIL import Image as PILImage

    images, num_pixels = [], 0
    for number, url in enumerate(urls, 1):
        kind, _, data = url.partition(";base64,")
        if not kind.startswith("data:image/"):
            raise UserError(f"image {number}: this server fetches nothing; send a data URL, data:image/png;base64,...")
        with reading(f"image {number}: not a readable image", "send another PNG, JPEG, WebP or GIF"):
            image = PILImage.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=IMAGE_FORMATS)
            num_pixels += image.width * image.height
            if num_pixels > MAX_PIXELS or max(image.size) > MAX_ASPECT * min(image.size):
                rule = f"at most {MAX_PIXELS} pixels in all, and {MAX_ASPECT} times as long as wide"
                raise ValueError(f"{image.width} x {image.height} pixels; {rule}")
            images.append(as_shown(image))
    return images
