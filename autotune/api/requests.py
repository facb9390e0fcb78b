"""Requests in the form of OpenAI's API: what a client may ask, and the prompt and settings of it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from autotune.errors import UserError
from autotune.files import Document, describe
from autotune.strict_parsing import parse_json
from autotune.workloads.pixels import as_shown
from autotune.workloads.prompt import Message, Part, Prompt, WorkloadPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 25  # of all images of a request
MAX_ASPECT = 20  # some processors scale an image's shorter side up
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_STOPS = 16
# Parameters that are not supported, with the values at which they change no answer, and parameters that never change
# one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("echo", "logprobs"), (False,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **{"suffix": ("",), "logit_bias": ({},), "tool_choice": ("none",), "function_call": ("none",)},
    **{"response_format": ({"type": "text"},), "modalities": (["text"],), "top_logprobs": ()},
    **{"min_p": (0,), "reasoning_effort": ("none",)},
}
IGNORED = ("user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


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


class _Asked(Document):
    """A part of a request, in which a null is as if left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        return {k: v for k, v in content.items() if v is not None} if isinstance(content, dict) else content


class ImageUrl(_Asked):
    url: str
    detail: Literal["auto"] = "auto"


class TextPart(_Asked):
    type: Literal["text"]
    text: str


class ImagePart(_Asked):
    type: Literal["image_url"]
    image_url: ImageUrl


class ChatMessage(_Asked):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]

    @property
    def parts(self) -> Sequence[TextPart | ImagePart]:
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class StreamOptions(_Asked):
    include_usage: bool = False
    include_obfuscation: bool = False


class Generation(_Asked):
    """The parameters of completions and of chats. Settings that are left out are those of the model's generation
    config.
    """

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    metadata: dict[str, str] = Field(default_factory=dict)
    """Its ``task`` chooses among the operating points."""

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of ``Decoder.generate``, but for the seed."""
        names = {"temperature", "top_p", "top_k", "repetition_penalty"}
        end = {"eos_token_id": [], "pad_token_id": 0} if self.ignore_eos else {}
        return self.model_dump(include=names, exclude_none=True) | end | {"workload": self.metadata.get("task")}


class CompletionRequest(Generation):
    """A text that the model continues, without the chat template; or its tokens."""

    prompt: str | list[Annotated[int, Field(ge=0, lt=2**31)]]
    max_tokens: int | None = Field(default=16, ge=1, lt=2**31)  # OpenAI's default

    @property
    def num_characters(self) -> int:
        return len(self.prompt)

    def inputs(self, processor: Any, device: Any) -> dict[str, Any]:
        """Inputs of the target; a ``UserError`` if there can be none."""
        import torch

        if isinstance(self.prompt, list):
            tokens = torch.tensor([self.prompt], dtype=torch.long, device=device)
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        try:
            return dict(processor(text=self.prompt, return_tensors="pt").to(device))
        except Exception as error:  # image tokens typed into the text
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"prompt: the processor refuses it ({reason}); change the text") from None


class ChatRequest(Generation):
    messages: list[ChatMessage] = Field(min_length=1)

    @property
    def num_characters(self) -> int:
        return sum(len(part.text) for message in self.messages for part in message.parts if isinstance(part, TextPart))

    def inputs(self, processor: Any, device: Any) -> dict[str, Any]:
        urls, chat = [], []
        for message in self.messages:
            parts = []
            for part in message.parts:
                if isinstance(part, ImagePart):
                    urls.append(part.image_url.url)
                parts.append(Part(type="text", text=part.text) if isinstance(part, TextPart) else Part(type="image"))
            chat.append(Message(role="system" if message.role == "developer" else message.role, content=parts))
        try:
            settings = Prompt(messages=chat, images=["data"] * len(urls))
        except ValidationError as error:
            raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return WorkloadPrompt("messages", settings, tuple(read_images(urls))).inputs(processor, device)


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
    for name in NEUTRAL.keys() & content.keys():
        value = content.pop(name)
        if not any(
            value == same and isinstance(value, bool) == isinstance(same, bool) for same in (None, *NEUTRAL[name])
        ):
            raise ApiError(400, f"{name}: got {value!r:.60}, which is not supported; leave {name} out", param=name)
    if (limit := content.pop("max_completion_tokens", None)) is not None:  # the later name
        content["max_tokens"] = limit
    try:
        asked = kind.model_validate({name: value for name, value in content.items() if name not in IGNORED})
    except ValidationError as error:
        location = error.errors()[0]["loc"]
        raise ApiError(400, describe(error, kind), param=str(location[0]) if location else None) from None
    if "" in asked.stops or len(asked.stops) > MAX_STOPS:
        raise ApiError(400, f"stop: at most {MAX_STOPS} texts, none of them empty; change them", param="stop")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options need a stream; set stream to true", param="stream_options")
    return asked


def read_images(urls: Sequence[str]) -> list[Image]:
    """The images in data URLs as RGB. Their sizes are checked before they are decoded."""
    from PIL import Image as PILImage

    images, num_pixels = [], 0
    for number, url in enumerate(urls, 1):
        kind, _, data = url.partition(";base64,")
        if not kind.startswith("data:image/"):
            raise UserError(f"image {number}: this server fetches nothing; send a data URL, data:image/png;base64,...")
        try:
            image = PILImage.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=IMAGE_FORMATS)
            num_pixels += image.width * image.height
            if num_pixels <= MAX_PIXELS and max(image.size) <= MAX_ASPECT * min(image.size):
                images.append(as_shown(image))
                continue
            reason = f"{image.width} x {image.height} pixels; at most {MAX_PIXELS} in all, {MAX_ASPECT} times as long as wide"
        except Exception as error:  # PIL's readers of damaged files raise anything
            reason = f"not a readable image, {' '.join(str(error).split())[:200]}"
        raise UserError(f"image {number}: {reason}; send another PNG, JPEG, WebP or GIF")
    return images
