"""Workloads: prompts, images and generation settings, from a JSONL file or the bundled digits.

A JSONL line is ``{"prompt": text, "images": [paths], "task": name, "split": "tune" | "evaluate" | "train",
"max_new_tokens": n, "temperature": t, "top_k": k, "top_p": p, "seed": s}``; only ``prompt`` is required, or in its place
``messages`` as in a chat: ``[{"role": "user", "content": text or parts}, ...]``. Image paths are relative to the file.

Prompts of the ``tune`` split choose a configuration, those of the ``evaluate`` split judge it, those of ``train`` are for
training drafts alone; without a split they alternate between the first two. No prompt does two of these: of equal ones
in two splits the one that judges stays.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from autotune.errors import UserError
from autotune.files import Document, describe, read_text
from autotune.workloads.digits import MAX_NEW_TOKENS as DIGITS_MAX_NEW_TOKENS
from autotune.workloads.digits import PASSAGE_TOKENS, TASKS, make_example

if TYPE_CHECKING:
    from PIL.Image import Image

WorkloadSplit = Literal["tune", "evaluate"]
LATER = ("messages", "top_k")  # settings that earlier versions did not have
BUNDLED = "digits"
WARM_UP_TOKENS = 32  # of an answer: enough to warm up whoever decodes it
FIRST_EVALUATE_EXAMPLE = 100_000  # the bundled workload's held-out examples from here on judge; those before it tune


class Part(Document):
    """Of a message: text, or the place of the next of the prompt's images."""

    type: Literal["text", "image"]
    text: str = ""


class Message(Document):
    """Of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str | list[Part]

    @property
    def parts(self) -> list[Part]:
        return [Part(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class Prompt(Document):
    """One prompt with its settings: ``prompt``, which is a user's only message, or ``messages``. ``images`` are paths; the
    bundled workload draws its own instead.
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
                raise ValueError("messages end before the answer; drop the assistant's last one")
            places = sum(part.type == "image" for message in self.messages for part in message.parts)
            if places not in (0, len(self.images)):
                raise ValueError(f"messages have {places} image parts for {len(self.images)} images; give one for each")
        return self

    @property
    def text(self) -> str:
        """For people: what was said last."""
        return self.prompt if self.messages is None else self.messages[-1].text

    @property
    def generation(self) -> dict[str, Any]:
        """Keyword arguments of ``Decoder.generate``."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
        }


P = TypeVar("P", bound=Prompt)


@dataclass(frozen=True)
class WorkloadPrompt:
    """A prompt ready to be processed: its settings, and its images as PIL images."""

    name: str
    settings: Prompt
    pixels: tuple[Image, ...]

    def inputs(self, processor: Any, device: Any = "cpu") -> dict[str, Any]:
        """What the Hugging Face processor makes of it, on a device.

        Raises:
            UserError: an image for a model that reads text alone, or text that does not fit the images.
        """
        said = self.settings.messages or self.settings.prompt
        if self.settings.messages is not None and not getattr(processor, "chat_template", None):
            raise UserError(f"{self.name}: the target's processor knows no chat; give prompt in place of messages")
        text = chat_text(processor, said, num_images=len(self.pixels))
        sees = hasattr(processor, "image_processor")
        if self.pixels and not sees:
            raise UserError(
                f"{self.name}: the prompt has an image, and the target reads text alone; drop it or use a model that sees"
            )
        images = {"images": list(self.pixels) or None} if sees else {}
        try:
            return dict(processor(text=text, return_tensors="pt", **images).to(device))
        except ValueError as error:  # image tokens typed into the text, for example
            raise UserError(
                f"{self.name}: the processor refuses the prompt ({error}); mend its text or images"
            ) from None

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of everything that decides the answer."""
        # What came later than the first hashes counts where it says something.
        later = {name for name in LATER if getattr(self.settings, name) == Prompt.model_fields[name].default}
        settings = self.settings.model_dump(exclude={"images", "split", *later})
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for image in self.pixels:
            digest.update(repr((image.mode, image.size)).encode())
            digest.update(image.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Workload:
    """Prompts of one split, under a name."""

    name: str
    split: WorkloadSplit
    prompts: tuple[WorkloadPrompt, ...]

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256("".join(prompt.sha256 for prompt in self.prompts).encode()).hexdigest()

    @property
    def tasks(self) -> list[str]:
        """Task names in order of first appearance."""
        return list(dict.fromkeys(prompt.settings.task for prompt in self.prompts))


def load_workload(name: str, split: WorkloadSplit, *, num_prompts: int | None = None) -> Workload:
    """The bundled workload (``digits``), or a JSONL file, in one split; the first ``num_prompts`` of it.

    Raises:
        UserError: no such file, a line that is no JSON or has unknown keys, an image that is none, a split without
            prompts of its own.
    """
    if name == BUNDLED:
        return Workload(name, split, tuple(_digits(split, num_prompts or 8 * len(TASKS))))
    path = Path(name)
    prompts = [load_prompt(path, number, settings) for number, settings in read_jsonl(path, Prompt)]
    of_split: dict[str, list[WorkloadPrompt]] = {"tune": [], "evaluate": [], "train": []}
    for i, prompt in enumerate(prompts):
        of_split[prompt.settings.split or ("evaluate" if i % 2 else "tune")].append(prompt)
    judges = {prompt.sha256 for prompt in of_split["evaluate"]} if split == "tune" else set()
    chosen = [prompt for prompt in of_split[split] if prompt.sha256 not in judges]
    if not chosen:
        raise UserError(
            f'{path}: a workload needs prompts of both splits; none is for {split!r}; add prompts, or mark some with "split": "{split}"'
        )
    return Workload(path.name, split, tuple(chosen[:num_prompts]))


def _digits(split: WorkloadSplit, num_prompts: int) -> list[WorkloadPrompt]:
    from PIL import Image

    prompts = []
    for number in range(num_prompts):
        task = TASKS[number % len(TASKS)]
        index = number // len(TASKS) + (FIRST_EVALUATE_EXAMPLE if split == "evaluate" else 0)
        example = make_example("held-out", task, index)
        limit = PASSAGE_TOKENS if task == "continue" else DIGITS_MAX_NEW_TOKENS
        pixels = () if example.image is None else (Image.fromarray(example.image),)
        prompts.append(
            WorkloadPrompt(
                f"{task}/{index}", Prompt(prompt=example.prompt, task=task, split=split, max_new_tokens=limit), pixels
            )
        )
    return prompts


def read_jsonl(path: Path, kind_of: type[P]) -> list[tuple[int, P]]:
    """The lines of a file, with their numbers; their images are not looked at yet.

    Raises:
        UserError: no such file, none but empty lines, a line that is no JSON or has unknown keys.
    """
    found = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            json.loads(line)
            found.append((number, kind_of.model_validate_json(line)))
        except ValidationError as error:
            raise UserError(f"{where}: {describe(error, kind_of)}") from None
        except ValueError as error:
            raise UserError(f"{where}: the file has one JSON object a line ({error}); mend that line") from None
    if not found:
        raise UserError(
            f'{path}: the file is empty; add a line such as {{"prompt": "What is this?", "images": ["photo.png"]}}'
        )
    return found


def load_prompt(path: Path, number: int, settings: Prompt) -> WorkloadPrompt:
    """A line of a file with its images.

    Raises:
        UserError: an image that is none.
    """
    pixels = tuple(load_image(path.parent / image) for image in settings.images)
    return WorkloadPrompt(f"{path.name}:{number}", settings, pixels)


def load_image(path: Path) -> Image:
    """The image in ``path``, as RGB.

    Raises:
        UserError: no such file, or no image that PIL reads.
    """
    from PIL import Image as PILImage
    from PIL import UnidentifiedImageError

    try:
        with PILImage.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise UserError(f"{path}: no such image; check the path") from None
    except (UnidentifiedImageError, OSError, PILImage.DecompressionBombError) as error:
        raise UserError(f"{path}: not an image that can be read ({error}); give a PNG or JPEG file") from None


def chat_text(processor: Any, said: str | Sequence[Message], *, num_images: int) -> str:
    """The prompt as the processor's chat template words it, ready for the answer; a processor without a template gets
    text as it is. Images stand where the messages say, or first in the user's first one.
    """
    if not getattr(processor, "chat_template", None):
        assert isinstance(said, str)
        return f"{getattr(processor, 'image_token', '')}\n" * num_images + said
    chat = [Message(role="user", content=said)] if isinstance(said, str) else said
    if not hasattr(processor, "image_processor"):
        messages = [{"role": message.role, "content": message.text} for message in chat]
        return str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    has_places = any(part.type == "image" for message in chat for part in message.parts)
    first_images: list[dict[str, str]] = [] if has_places else [{"type": "image"}] * num_images
    worded = []
    for message in chat:
        content = [{"type": "text", "text": p.text} if p.type == "text" else {"type": "image"} for p in message.parts]
        if message.role == "user":
            content, first_images = [*first_images, *content], []
        worded.append({"role": message.role, "content": content})
    return str(processor.apply_chat_template(worded, add_generation_prompt=True, tokenize=False))
