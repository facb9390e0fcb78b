"""Workloads: prompts, images and generation settings, from a JSONL file or bundled.

A JSONL line is ``{"prompt": text, "images": [paths], "task": name, "split": "tune" | "evaluate" | "train",
"max_new_tokens": n, "temperature": t, "top_k": k, "top_p": p, "seed": s}``; only ``prompt`` is required, or in its place
``messages`` as in a chat: ``[{"role": "user", "content": text or parts}, ...]``. Image paths are relative to the file.

Prompts of the ``tune`` split choose a configuration, those of the ``evaluate`` split judge it, and those of ``train`` are
only for training drafts; prompts without a split alternate between the first two. A prompt that occurs in two splits is
used for evaluation only.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from autotune.errors import UserError
from autotune.files import Document, data_root, describe, read_text
from autotune.workloads.digits import MAX_NEW_TOKENS as DIGITS_MAX_NEW_TOKENS
from autotune.workloads.digits import PASSAGE_TOKENS, TASKS, make_example

if TYPE_CHECKING:
    from PIL.Image import Image

    from autotune.documents.decoding_profile import WorkloadReference

WorkloadSplit = Literal["tune", "evaluate"]
ADDED_SETTINGS = ("messages", "top_k")  # hashed only where they are set, so that older hashes stay valid
BUNDLED = ("digits", "code")
"""Bundled workloads, each named after its pair: the digits are drawn, the prompts on source code are a JSONL file."""
WARM_UP_TOKENS = 32  # tokens decoded to warm up an arm
FIRST_EVALUATE_EXAMPLE = 100_000  # of the held-out examples of the bundled workload: those before it are for tuning


class Part(Document):
    """A part of a message: text, or a marker for the prompt's next image."""

    type: Literal["text", "image"]
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


class Prompt(Document):
    """One prompt with its generation settings.

    ``prompt`` is the user's only message; ``messages`` is a chat. ``images`` are paths; the bundled workload draws its images.
    """

    prompt: str = ""
    messages: list[Message] | None = Field(default=None, min_length=1)
    images: list[str] = Field(default_factory=list)
    task: str = "prompt"
    split: Literal["tune", "evaluate", "train"] | None = None
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_of_two(self) -> Prompt:
        has_prompt = "prompt" in self.model_fields_set if self.messages is None else bool(self.prompt)
        if has_prompt == (self.messages is not None):
            raise ValueError("a line has either prompt or messages; give one of them")
        if self.messages is not None:
            if self.messages[-1].role == "assistant":
                raise ValueError("messages must end with the user's turn; drop the assistant's last message")
            num_image_parts = sum(part.type == "image" for message in self.messages for part in message.parts)
            if num_image_parts not in (0, len(self.images)):
                raise ValueError(
                    f"messages have {num_image_parts} image parts for {len(self.images)} images; give one part for each image"
                )
        return self

    @property
    def text(self) -> str:
        """The last message, for display."""
        return self.prompt if self.messages is None else self.messages[-1].text

    @property
    def generation(self) -> dict[str, Any]:
        """Keyword arguments of ``Decoder.generate``."""
        return self.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p", "seed"})


class AnsweredPrompt(Prompt):
    """A prompt with a reference answer. In training files the target generates a missing one."""

    answer: str | None = None

    @property
    def unanswered(self) -> Prompt:
        return Prompt(**self.model_dump(exclude={"answer"}, exclude_unset=True))


P = TypeVar("P", bound=Prompt)


@dataclass(frozen=True)
class WorkloadPrompt:
    """A prompt with its images loaded."""

    name: str
    settings: Prompt
    pixels: tuple[Image, ...]

    def inputs(self, processor: Any, device: Any = "cpu") -> dict[str, Any]:
        """The inputs that the Hugging Face processor makes of the prompt, on a device.

        Raises:
            UserError: an image for a text model, messages without a chat template, or text that does not match the images.
        """
        content = self.settings.messages or self.settings.prompt
        if self.settings.messages is not None and not getattr(processor, "chat_template", None):
            raise UserError(
                f"{self.name}: the target's processor has no chat template; give prompt instead of messages"
            )
        text = chat_text(processor, content, num_images=len(self.pixels))
        reads_images = hasattr(processor, "image_processor")
        if self.pixels and not reads_images:
            raise UserError(
                f"{self.name}: the prompt has an image, but the target reads text only; drop the image or use a vision-language model"
            )
        images = {"images": list(self.pixels) or None} if reads_images else {}
        try:
            return dict(processor(text=text, return_tensors="pt", **images).to(device))
        except ValueError as error:  # image tokens typed into the text, for example
            message = f"{self.name}: the processor refuses the prompt ({error}); fix its text or images"
            raise UserError(message) from None

    def cut(self, max_new_tokens: int) -> WorkloadPrompt:
        """The prompt with a lower limit of its answer's length."""
        limit = min(self.settings.max_new_tokens, max_new_tokens)
        return replace(self, settings=self.settings.model_copy(update={"max_new_tokens": limit}))

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of everything that determines the answer."""
        unset = {name for name in ADDED_SETTINGS if getattr(self.settings, name) == Prompt.model_fields[name].default}
        settings = self.settings.model_dump(exclude={"images", "split", *unset})
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for image in self.pixels:
            digest.update(repr((image.mode, image.size)).encode())
            digest.update(image.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Workload:
    """The prompts of one split."""

    name: str
    split: WorkloadSplit
    prompts: tuple[WorkloadPrompt, ...]

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256("".join(prompt.sha256 for prompt in self.prompts).encode()).hexdigest()

    def cut(self, num_prompts: int, max_new_tokens: int | None = None) -> Workload:
        """The first prompts, with answers of at most ``max_new_tokens``; None: of their own limits."""
        prompts = self.prompts[:num_prompts]
        if max_new_tokens is not None:
            prompts = tuple(prompt.cut(max_new_tokens) for prompt in prompts)
        return Workload(self.name, self.split, prompts)

    def readable_by(self, processor: Any) -> Workload:
        """The prompts without images, if the processor reads text only.

        Raises:
            UserError: every prompt has an image.
        """
        if hasattr(processor, "image_processor"):
            return self
        prompts = tuple(prompt for prompt in self.prompts if not prompt.pixels)
        if not prompts:
            raise UserError(
                f"{self.name}: the target reads text only, and every prompt has an image; name another --workload"
            )
        return replace(self, prompts=prompts)

    def sampled(self, temperature: float) -> Workload:
        """The prompts at another temperature, each with its index as seed."""
        prompts = tuple(
            replace(prompt, settings=prompt.settings.model_copy(update={"temperature": temperature, "seed": seed}))
            for seed, prompt in enumerate(self.prompts)
        )
        return Workload(self.name, self.split, prompts)

    def as_searched(self, found: WorkloadReference) -> Workload:
        """The prompts at the temperature, and with the limit of the answers, of the search that made a profile."""
        prompts = self if found.temperature is None else self.sampled(found.temperature)
        return prompts.cut(len(self.prompts), found.max_new_tokens)

    @property
    def tasks(self) -> list[str]:
        """Task names in order of first appearance."""
        return list(dict.fromkeys(prompt.settings.task for prompt in self.prompts))


def load_workload(name: str, split: WorkloadSplit, *, num_prompts: int | None = None) -> Workload:
    """Load one split of a bundled workload (``digits``, ``code``) or of a JSONL file, at most its first ``num_prompts`` prompts.

    Raises:
        UserError: missing file, invalid line or image, or a split without prompts.
    """
    if name == "digits":
        return Workload(name, split, tuple(_digits(split, num_prompts or 8 * len(TASKS))))
    if name == "code":
        lines = [line for line in code_prompts() if line[1].split == split][:num_prompts]
        return Workload(
            name, split, tuple(WorkloadPrompt(f"{line.task}/{number}", line.unanswered, ()) for number, line in lines)
        )
    path = Path(name)
    prompts = [load_prompt(path, number, settings) for number, settings in read_jsonl(path, Prompt)]
    splits: dict[str, list[WorkloadPrompt]] = {"tune": [], "evaluate": [], "train": []}
    for i, prompt in enumerate(prompts):
        splits[prompt.settings.split or ("evaluate" if i % 2 else "tune")].append(prompt)
    evaluated = {prompt.sha256 for prompt in splits["evaluate"]} if split == "tune" else set()
    chosen = [prompt for prompt in splits[split] if prompt.sha256 not in evaluated]
    if not chosen:
        raise UserError(
            f'{path}: a workload needs prompts in both splits; none is in {split!r}; add prompts, or mark some with "split": "{split}"'
        )
    return Workload(path.name, split, tuple(chosen[:num_prompts]))


def code_prompts() -> list[tuple[int, AnsweredPrompt]]:
    """The prompts of the bundled workload on source code with their reference answers and line numbers, both splits."""
    return read_jsonl(data_root() / "drafts" / "code" / "workload.jsonl", AnsweredPrompt)


def _digits(split: WorkloadSplit, num_prompts: int) -> list[WorkloadPrompt]:
    from PIL import Image

    prompts = []
    for number in range(num_prompts):
        task = TASKS[number % len(TASKS)]
        index = number // len(TASKS) + (FIRST_EVALUATE_EXAMPLE if split == "evaluate" else 0)
        example = make_example("held-out", task, index)
        limit = PASSAGE_TOKENS if task == "continue" else DIGITS_MAX_NEW_TOKENS
        pixels = () if example.image is None else (Image.fromarray(example.image),)
        settings = Prompt(prompt=example.prompt, task=task, split=split, max_new_tokens=limit)
        prompts.append(WorkloadPrompt(f"{task}/{index}", settings, pixels))
    return prompts


def read_jsonl(path: Path, kind_of: type[P]) -> list[tuple[int, P]]:
    """Parse the non-empty lines of a file, with their line numbers. Images are not loaded.

    Raises:
        UserError: missing or empty file, or an invalid line.
    """
    records = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            json.loads(line)
            records.append((number, kind_of.model_validate_json(line)))
        except ValidationError as error:
            raise UserError(f"{path}:{number}: {describe(error, kind_of)}") from None
        except ValueError as error:
            raise UserError(f"{path}:{number}: every line must be a JSON object ({error}); fix that line") from None
    if not records:
        raise UserError(
            f'{path}: the file is empty; add a line such as {{"prompt": "What is this?", "images": ["photo.png"]}}'
        )
    return records


def load_prompt(path: Path, number: int, settings: Prompt) -> WorkloadPrompt:
    """A line of a file with its images loaded.

    Raises:
        UserError: an image that cannot be read.
    """
    pixels = tuple(load_image(path.parent / image) for image in settings.images)
    return WorkloadPrompt(f"{path.name}:{number}", settings, pixels)


def load_image(path: Path) -> Image:
    """The image in ``path`` as RGB.

    Raises:
        UserError: missing file, or not an image that PIL can read.
    """
    from PIL import Image as PILImage

    try:
        with PILImage.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise UserError(f"{path}: no such image; check the path") from None
    except (OSError, PILImage.DecompressionBombError) as error:
        raise UserError(f"{path}: not a readable image ({error}); give a PNG or JPEG file") from None


def chat_text(processor: Any, content: str | Sequence[Message], *, num_images: int) -> str:
    """The text of a prompt after the processor's chat template, with the generation prompt.

    Without a template the text is used unchanged. Image markers are placed where the messages say, or at the beginning of
    the first user message.
    """
    if not getattr(processor, "chat_template", None):
        assert isinstance(content, str)
        return f"{getattr(processor, 'image_token', '')}\n" * num_images + content
    chat = [Message(role="user", content=content)] if isinstance(content, str) else content
    if not hasattr(processor, "image_processor"):
        messages = [{"role": message.role, "content": message.text} for message in chat]
        return str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    has_image_parts = any(part.type == "image" for message in chat for part in message.parts)
    first_images: list[dict[str, str]] = [] if has_image_parts else [{"type": "image"}] * num_images
    rendered = []
    for message in chat:
        parts = [{"type": "text", "text": p.text} if p.type == "text" else {"type": "image"} for p in message.parts]
        if message.role == "user":
            parts, first_images = [*first_images, *parts], []
        rendered.append({"role": message.role, "content": parts})
    return str(processor.apply_chat_template(rendered, add_generation_prompt=True, tokenize=False))
