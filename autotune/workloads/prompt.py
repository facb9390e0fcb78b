"""Prompts: their settings as a line of a workload has them, and with their images loaded as inputs of a processor."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, JsonValue, model_validator

from autotune.errors import UserError, reading
from autotune.files import Document
from autotune.workloads.chat import Message, Variables, chat_for, check_variables, used_variables, without_paths
from autotune.workloads.hub import sibling
from autotune.workloads.pixels import Video, load_image, load_video

if TYPE_CHECKING:
    from PIL.Image import Image

ADDED_SETTINGS = (
    "messages",
    "top_k",
    "turns",
    "chat_template_kwargs",
    "min_pixels",
    "max_pixels",
)  # hashed only where they are set, so that older hashes stay valid


class Prompt(Document):
    """One prompt with its generation settings.

    ``prompt`` is the user's only message; ``messages`` is a chat; ``turns`` are the user's messages of a conversation,
    in which the target's own answers come between them. ``images`` and ``videos`` are paths, of the first message.
    """

    prompt: str = ""
    messages: list[Message] | None = Field(default=None, min_length=1)
    turns: list[str] | None = Field(default=None, min_length=1)
    images: list[str] = Field(default_factory=list)
    videos: list[str] = Field(default_factory=list)
    fps: float = Field(default=2.0, gt=0)
    """Frames of a second of the videos, see ``load_video``; 2 is the default of Qwen-VL's own tools."""
    task: str = "prompt"
    split: Literal["tune", "evaluate", "train"] | None = None
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)
    chat_template_kwargs: Annotated[dict[str, JsonValue], AfterValidator(check_variables)] | None = None
    """Variables of the chat template."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Pixels that the processor scales an image up to, at least; of Qwen's image processors. None: the processor's."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Pixels that the processor scales an image down to, at most."""

    @model_validator(mode="before")
    @classmethod
    def _with_paths_of_parts(cls, content: Any) -> Any:
        """Messages whose parts hold the paths of their images and videos, as Qwen's tools and OpenAI's API write
        them: the paths move to ``images`` and ``videos``.
        """
        messages = content.get("messages") if isinstance(content, dict) else None
        if not isinstance(messages, list):
            return content
        paths: dict[str, list[Any]] = {"image": [], "video": []}
        chat = [without_paths(message, paths) for message in messages]
        moved = {f"{kind}s": named for kind, named in paths.items() if named}
        for key in moved:
            if content.get(key):
                raise ValueError(f"messages name their {key}, and so does {key!r}; give them in one place")
        return {**content, "messages": chat, **moved}

    @model_validator(mode="after")
    def _one_of_three(self) -> Prompt:
        num_given = sum(given is not None for given in (self.messages, self.turns))
        has_prompt = bool(self.prompt) if num_given else "prompt" in self.model_fields_set
        if has_prompt + num_given != 1:
            raise ValueError("a line has turns, or either prompt or messages; give one of them")
        if self.messages is not None:
            if self.messages[-1].role == "assistant":
                raise ValueError("messages must end with the user's turn; drop the assistant's last message")
            types: list[str] = [part.type for message in self.messages for part in message.parts]
            for kind, paths in (("image", self.images), ("video", self.videos)):
                if types.count(kind) not in (0, len(paths)):
                    raise ValueError(
                        f"messages have {types.count(kind)} {kind} parts for {len(paths)} {kind}s; give one part for each {kind}"
                    )
        return self

    @property
    def text(self) -> str:
        """The last message, for display."""
        if self.turns is not None:
            return self.turns[-1]
        return self.prompt if self.messages is None else self.messages[-1].text

    @property
    def generation(self) -> dict[str, Any]:
        """Keyword arguments of ``Decoder.generate``."""
        return self.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p", "seed"})


class AnsweredPrompt(Prompt):
    """A prompt with a reference answer. In training files the target generates a missing one."""

    answer: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_last_message(cls, content: Any) -> Any:
        """A chat that ends with the assistant: its last message is the answer."""
        if isinstance(content, dict) and content.get("turns") is not None:
            raise ValueError("a training line has one answer, so that it has no turns; give messages")
        messages = content.get("messages") if isinstance(content, dict) else None
        last = messages[-1] if isinstance(messages, list) and messages else None
        if messages is None or not isinstance(last, dict) or last.get("role") != "assistant":
            return content
        if content.get("answer") is not None:
            raise ValueError("messages end with the assistant's answer, and 'answer' is another; give one of them")
        return {**content, "messages": messages[:-1], "answer": Message.model_validate(last).text}

    @property
    def unanswered(self) -> Prompt:
        return Prompt(**self.model_dump(exclude={"answer"}, exclude_unset=True))


@dataclass(frozen=True)
class WorkloadPrompt:
    """A prompt with its images and videos loaded; of a conversation the prompt of one turn, with the turns up to it
    (``workloads.conversations``). The hash leaves the target's answers out, because they follow from the rest.
    """

    name: str
    settings: Prompt
    pixels: tuple[Image | Video, ...]
    """The images, then the videos."""
    answers: tuple[str, ...] = ()
    """The target's answers to the earlier turns."""

    @property
    def videos(self) -> list[Video]:
        return [seen for seen in self.pixels if isinstance(seen, Video)]

    @property
    def images(self) -> list[Image]:
        return [seen for seen in self.pixels if not isinstance(seen, Video)]

    @property
    def pictures(self) -> list[Image]:
        """The images and the first frames of the videos, for display."""
        from PIL.Image import fromarray

        return [*self.images, *(fromarray(video.frames[0]) for video in self.videos)]

    @property
    def earlier(self) -> WorkloadPrompt | None:
        """The prompt of the turn before; None for a first turn."""
        turns = self.settings.turns
        if turns is None or len(turns) == 1:
            return None
        only = {"prompt": turns[0], "turns": None} if len(turns) == 2 else {"turns": turns[:-1]}
        return replace(self, settings=self.settings.model_copy(update=only), answers=self.answers[:-1])

    @property
    def is_answered(self) -> bool:
        """Whether the answers to all earlier turns are known."""
        return len(self.answers) == len(self.settings.turns or (self.settings.prompt,)) - 1

    @property
    def conversation(self) -> list[WorkloadPrompt]:
        """The prompts of the turns up to this one, from the first."""
        return [self] if self.earlier is None else [*self.earlier.conversation, self]

    @property
    def content(self) -> str | list[Message]:
        """The user's only message, or the chat with the target's answers to earlier turns."""
        turns, answers = self.settings.turns, self.answers
        if turns is None:
            return self.settings.messages or self.settings.prompt
        assert self.is_answered, f"{self.name}: the answers to its earlier turns are not known yet"
        chat = [Message(role="user", content=turns[0])]
        for answer, turn in zip(answers, turns[1:], strict=True):
            chat += [Message(role="assistant", content=answer), Message(role="user", content=turn)]
        return chat

    @property
    def with_all_answers(self) -> WorkloadPrompt:
        """The prompt with empty answers in place of those that are not known yet."""
        return self if self.is_answered else replace(self, answers=("",) * (len(self.settings.turns or ()) - 1))

    def with_variables(self, variables: Variables) -> WorkloadPrompt:
        """The prompt with these variables of the chat template, of which its own replace those of the same name."""
        merged = {**variables, **(self.settings.chat_template_kwargs or {})}
        return replace(self, settings=self.settings.model_copy(update={"chat_template_kwargs": merged or None}))

    def most_tokens(self, processor: Any) -> int:
        """Number of tokens of the prompt and its answer; answers that are not known are as long as they may be."""
        num_answers = 1 if self.is_answered else len(self.settings.turns or ())
        num_tokens: int = self.with_all_answers.inputs(processor)["input_ids"].shape[1]
        return num_tokens + num_answers * self.settings.max_new_tokens

    def inputs(self, processor: Any, device: Any = "cpu") -> dict[str, Any]:
        """The inputs that the Hugging Face processor makes of the prompt, on a device: the tokens of a chat are those
        of ``apply_chat_template(..., tokenize=True)``.

        Raises:
            UserError: an image or video that the model does not read, messages without a chat template, or text that
                does not match the images.
        """
        if not isinstance(self.content, str) and not getattr(processor, "chat_template", None):
            raise UserError(
                f"{self.name}: the target's processor has no chat template; give prompt instead of messages or turns"
            )
        if not can_read(processor, self.pixels):
            raise UserError(
                f"{self.name}: the prompt has an image, but the target reads text only; drop the image or use a vision-language model"
                if not hasattr(processor, "image_processor")
                else f"{self.name}: the prompt has a video, but the target reads none; give its frames as images, or use another model"
            )
        options: dict[str, Any] = {}
        if self.videos:  # all of their frames are read, at the times that they had
            counts = [(len(video.frames), video.fps) for video in self.videos]
            metadata = [{"total_num_frames": n, "fps": fps, "frames_indices": list(range(n))} for n, fps in counts]
            options = {"do_sample_frames": False, "video_metadata": metadata}
        if limits := self._limits(processor):
            options["images_kwargs"] = {"size": limits}
        # Such as image tokens in the text, text that is not Unicode, or a broken template.
        with reading(f"{self.name}: the processor refuses the prompt", "fix its text, images, or the chat template"):
            return dict(self._encode(processor, options).to(device))

    def _encode(self, processor: Any, options: dict[str, Any]) -> Any:
        """Inputs of the prompt; ``options`` are of the call of a processor that reads images."""
        frames = [video.frames for video in self.videos]
        if not getattr(processor, "chat_template", None):  # text has the tokenizer's own special tokens
            seen: dict[str, list[Any]] = {"image": [*self.images], "video": [*frames]}
            marks = "".join(f"{getattr(processor, f'{kind}_token', '')}\n" * len(seen[kind]) for kind in seen)
            options |= {f"{kind}s": pixels for kind, pixels in seen.items() if pixels}
            return processor(text=f"{marks}{self.content}", return_tensors="pt", **options)
        rest: dict[str, Any] = used_variables(processor, self.settings.chat_template_kwargs or {})
        rest |= {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        messages = chat_for(processor, self.content, num_images=len(self.images), num_videos=len(frames))
        if hasattr(processor, "image_processor"):
            pixels = {"image": iter(self.images), "video": iter(frames)}
            for part in (part for message in messages for part in message["content"] if part["type"] in pixels):
                part[part["type"]] = next(pixels[part["type"]])
            rest |= {"processor_kwargs": options}
        return processor.apply_chat_template(messages, **rest)

    def _limits(self, processor: Any) -> dict[str, int]:
        """The size of images, as Qwen's image processors have it; empty where the prompt sets none."""
        names = {"shortest_edge": self.settings.min_pixels, "longest_edge": self.settings.max_pixels}
        limits = {name: number for name, number in names.items() if number is not None}
        if not limits or not self.images:
            return {}
        images = processor.image_processor
        if "min_pixels" not in getattr(images.valid_kwargs, "__annotations__", {}):
            raise UserError(
                f"{self.name}: min_pixels and max_pixels are settings of Qwen's image processors, and {type(images).__name__} "
                "has none; leave them out"
            )
        return {name: getattr(images.size, name) for name in names} | limits

    def cut(self, max_new_tokens: int) -> WorkloadPrompt:
        """The prompt with a lower limit of the answers' lengths."""
        if self.settings.max_new_tokens <= max_new_tokens:
            return self
        settings = self.settings.model_copy(update={"max_new_tokens": max_new_tokens})
        return replace(self, settings=settings, answers=())  # earlier answers may be shorter too

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of everything that determines the answer."""
        unset = {name for name in ADDED_SETTINGS if getattr(self.settings, name) == Prompt.model_fields[name].default}
        settings = self.settings.model_dump(exclude={"images", "videos", "fps", "split", *unset})
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for image in self.images:
            digest.update(repr((image.mode, image.size)).encode())
            digest.update(image.tobytes())
        for video in self.videos:
            digest.update(repr((video.frames.shape, video.fps)).encode())
            digest.update(video.frames.tobytes())
        return digest.hexdigest()


def load_prompt(address: str | Path, number: int, settings: Prompt) -> WorkloadPrompt:
    """A row of a file with its images and videos loaded; of a conversation the last turn."""
    images = (load_image(sibling(address, image)) for image in settings.images)
    videos = (load_video(sibling(address, video), settings.fps) for video in settings.videos)
    return WorkloadPrompt(f"{Path(address).name}:{number}", settings, (*images, *videos))


def load_turns(address: str | Path, number: int, settings: Prompt) -> list[WorkloadPrompt]:
    prompts = load_prompt(address, number, settings).conversation
    if len(prompts) == 1:
        return prompts
    return [replace(prompt, name=f"{prompt.name}/turn-{turn}") for turn, prompt in enumerate(prompts, start=1)]


def can_read(processor: Any, pixels: Sequence[Image | Video]) -> bool:
    """Whether a processor reads such images and videos."""
    names = {"video_processor" if isinstance(seen, Video) else "image_processor" for seen in pixels}
    return all(getattr(processor, name, None) is not None for name in names)


def hash_inputs(inputs: Mapping[str, Any]) -> str:
    """Hash of the token ids, pixels and other arrays that a processor made, on the CPU."""
    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        array = np.asarray(value)
        digest.update(repr((name, str(array.dtype), array.shape)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
