"""Readers of workload files: our own JSONL, and the formats of public benchmarks.

| format | rows |
|---|---|
| ``autotune`` | ``{"prompt": text, "images": [paths], ...}``, see ``workloads.workload`` |
| ``mt-bench`` | ``{"question_id": 81, "category": "writing", "turns": [text, text]}`` |
| ``spec-bench`` | as ``mt-bench``; the categories of MT-Bench are one task, as Spec-Bench reports them |
| ``mmspec`` | ``{"id": text, "image": path, "turns": [text], "topic": "general vqa"}`` |
| ``speed-bench`` | ``{"question_id": text, "category": text, "turns": [text], ...}``, JSONL or Parquet; ``messages``
once prepared |
| ``vllm`` | ``{"prompt": text, "image_files": [paths], "output_tokens": n}``, or ``content`` with parts of text and
images |
| ``sharegpt`` | ``[{"conversations": [{"from": "human", "value": text}, ...]}]``, JSON or JSONL; LLaVA's data have
``image`` beside them |
| ``humaneval`` | ``{"task_id": "HumanEval/0", "prompt": code, ...}`` |
| ``gsm8k`` | ``{"question": text, "answer": text}`` |

Text files may be compressed by gzip.

The reference answers of a benchmark are not used: later turns follow the target's own answers. Questions of a benchmark
are taken from its tasks in turn, so that the first ones are of all tasks, and alternate between the splits within each
task.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from autotune.errors import UserError
from autotune.workloads.chat import Message, Part
from autotune.workloads.prompt import AnsweredPrompt, Prompt
from autotune.workloads.row_files import parse_rows, read_rows

Format = Literal[
    "autotune", "mt-bench", "spec-bench", "mmspec", "speed-bench", "vllm", "sharegpt", "humaneval", "gsm8k"
]
FORMATS: tuple[Format, ...] = get_args(Format)
OWN: Format = "autotune"
BENCHMARK_TOKENS = 1024
"""Limit of an answer, as in the scripts of MT-Bench and Spec-Bench."""
VLLM_TOKENS = 256
"""vLLM's default for rows without ``output_tokens``."""
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
SIGNS: tuple[tuple[Format, set[str]], ...] = (
    ("sharegpt", {"conversations"}),
    *(("vllm", {key}) for key in ("image_files", "content", "output_tokens")),
    ("humaneval", {"task_id"}),
    ("gsm8k", {"question"}),
    ("mmspec", {"turns", "image", "topic"}),
    *(("speed-bench", {"question_id", key}) for key in ("sub_category", "source", "src_id", "difficulty")),
    *(("speed-bench", {"question_id", key}) for key in ("multiturn", "messages")),
    ("mt-bench", {"question_id", "turns"}),
)
"""Formats with the keys of their rows, in the order in which they are looked for."""

_MARKER = re.compile("(<image>|<video>)")
PIXEL_KEYS = (
    *("image", "images", "image_files", "image_path", "image_paths", "image_url"),
    *("video", "videos", "video_path", "audio", "audios"),
)
"""Keys under which data sets hold what a question is about."""
Text = Annotated[str, Field(min_length=1)]
Turns = Annotated[list[Text], Field(min_length=1)]


def read_prompts(path: Path, format: Format | None = None) -> tuple[Format, list[tuple[int, Prompt]]]:
    """Read a workload: its format, and its prompts with the numbers of their rows, from 1 on. Images are not
    loaded; the images of a conversation are its first message's.

    Args:
        format: None finds it out from the first row.

    Raises:
        UserError: missing or empty file, an invalid row, a row of another format, or a placeholder of SPEED-Bench.
    """
    rows = read_rows(path)
    chosen = format or detect(rows)
    if chosen == OWN:
        return OWN, parse_rows(path, rows, Prompt, lambda row: row)
    prompts = parse_rows(path, rows, _READERS[chosen], lambda row: row.prompt(chosen))
    if not prompts:
        raise UserError(f"{path}: the file has no question; give a file of {chosen} with at least one")
    return chosen, by_tasks_in_turn(prompts)


def read_answered(path: Path) -> list[tuple[int, AnsweredPrompt]]:
    """The examples of a training file with their line numbers: our own JSONL, or conversations of ShareGPT, in which
    the last answer is trained on. Images are not loaded.

    Raises:
        UserError: missing or empty file, or an invalid row.
    """
    rows = read_rows(path)
    if detect(rows) != "sharegpt":
        return parse_rows(path, rows, AnsweredPrompt, lambda row: row)
    if not (examples := parse_rows(path, rows, _ShareGpt, lambda row: row.answered())):
        raise UserError(f"{path}: the file has no question; give a file of sharegpt with at least one")
    return examples


def detect(rows: Sequence[tuple[int, Any]]) -> Format:
    """The format of a file with these rows, by the keys of the first one; Spec-Bench has categories that MT-Bench has
    not.
    """
    first = rows[0][1] if rows else {}
    keys = set(first) if isinstance(first, Mapping) else set()
    format = next((format for format, signs in SIGNS if signs <= keys), OWN)
    categories = {str(row.get("category")) for _, row in rows if isinstance(row, Mapping)}
    return "spec-bench" if format == "mt-bench" and not categories <= MT_BENCH_CATEGORIES else format


def by_tasks_in_turn(rows: Sequence[tuple[int, Prompt]]) -> list[tuple[int, Prompt]]:
    """The questions of a benchmark in the order in which they are used, each once, with their splits."""
    unique = {row[1].model_dump_json(): row for row in reversed(rows)}
    by_task: dict[str, list[tuple[int, Prompt]]] = defaultdict(list)
    for number, prompt in sorted(unique.values(), key=lambda row: row[0]):
        questions = by_task[prompt.task]
        questions.append((number, prompt.model_copy(update={"split": "evaluate" if len(questions) % 2 else "tune"})))
    return [row for of_turn in itertools.zip_longest(*by_task.values()) for row in of_turn if row is not None]


class _Part(BaseModel):
    """A part of a row. Keys that are not read are ignored, because benchmarks add them freely."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class _Row(_Part, ABC):
    """A row of a public format."""

    @model_validator(mode="before")
    @classmethod
    def _has_only_pixels_that_are_read(cls, content: Any) -> Any:
        """Refuse images, videos and sounds under a key that the format does not have: the question is about them."""
        keys = content if isinstance(content, Mapping) else {}
        unread = [key for key in PIXEL_KEYS if keys.get(key) and key not in cls.model_fields]
        if unread:
            raise ValueError(
                f"the row has {unread[0]!r}, which this format does not read; write it as autotune's JSONL"
            )
        return content

    @abstractmethod
    def prompt(self, format: Format) -> Prompt | None:
        """The row as a prompt; None for a row that asks nothing.

        Raises:
            ValueError: the row cannot be used; one line without the row's number.
        """


class _Question(_Row):
    category: str
    turns: Turns

    def prompt(self, format: Format) -> Prompt:
        is_mt_bench = format == "spec-bench" and self.category in MT_BENCH_CATEGORIES
        return _conversation(self.turns, task=MT_BENCH if is_mt_bench else self.category)


class _Mmspec(_Row):
    image: str
    turns: Turns
    topic: str

    def prompt(self, format: Format) -> Prompt:
        """``image`` is relative to the folder ``images`` next to the file."""
        return _conversation(self.turns, task=self.topic, images=[f"images/{self.image}"])


class _UserMessage(_Part):
    role: Literal["user"]
    content: Text


class _SpeedBench(_Row):
    category: str
    turns: Turns | None = None
    messages: Annotated[list[_UserMessage], Field(min_length=1)] | None = None

    def prompt(self, format: Format) -> Prompt:
        turns = self.turns or [message.content for message in self.messages or ()]
        if not turns:
            raise ValueError("key 'turns' is required and missing; add it, or messages")
        if any(SPEED_BENCH_PLACEHOLDER in turn for turn in turns):
            raise ValueError(
                "turns: the row has a placeholder instead of its text, which SPEED-Bench may not distribute; prepare the data "
                "with NVIDIA's specdec_bench, and give the prepared file"
            )
        return _conversation(turns, task=self.category)


class _Vllm(_Row):
    text: Text | None = Field(default=None, alias="prompt")
    image_files: list[str] = Field(default_factory=list)
    content: list[dict[str, Any]] | None = None
    """Parts, of which those of images hold their paths."""
    output_tokens: int = Field(default=VLLM_TOKENS, ge=1)

    def prompt(self, format: Format) -> Prompt:
        if (self.text is None) == (self.content is None):
            raise ValueError("a row has either 'prompt' or 'content'; give one of them")
        asked: dict[str, Any] = {"prompt": self.text, "images": self.image_files}
        if self.content is not None:
            asked = {"messages": [{"role": "user", "content": self.content}]}
        return Prompt.model_validate({**asked, "max_new_tokens": self.output_tokens})


_Paths = Annotated[Sequence[str], BeforeValidator(lambda paths: [paths] if isinstance(paths, str) else paths or [])]


_ROLES = {
    **{"system": "system", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
}


class _ShareGptMessage(_Part):
    speaker: str = Field(alias="from")
    value: str


class _ShareGpt(_Row):
    conversations: list[_ShareGptMessage]
    image: _Paths = ()
    images: _Paths = ()
    video: _Paths = ()
    videos: _Paths = ()

    def prompt(self, format: Format) -> Prompt | None:
        """The turns of ``human`` up to an empty one, or to one with further images. Conversations without any exist in
        the published file, and are left out.

        The data of LLaVA have images beside the conversation, and ``<image>`` in the text where they stand.
        """
        asked = (message.value for message in self.conversations if message.speaker in ("human", "user"))
        turns = list(itertools.takewhile(str.strip, asked))
        pixels = {"images": [*self.image, *self.images], "videos": [*self.video, *self.videos]}
        num_pixels = sum(map(len, pixels.values()))
        if not turns or not num_pixels:
            return _conversation(turns, task=format) if turns else None
        num_markers = sum(len(_MARKER.findall(turn)) for turn in turns)
        if num_markers not in (0, num_pixels):
            raise ValueError(
                f"the text has {num_markers} markers for {num_pixels} images and videos; give one for each"
            )
        first, *later = turns
        later = list(itertools.takewhile(lambda turn: not _MARKER.search(turn), later))
        parts = [_marked_part(piece) for piece in _MARKER.split(first) if piece.strip()]
        if num_markers:
            pixels = {key: paths[: sum(f"{part.type}s" == key for part in parts)] for key, paths in pixels.items()}
        if later:
            return _conversation(["".join(part.text for part in parts), *later], task=format, **pixels)
        message = Message(role="user", content=parts)
        return Prompt(
            messages=[message],
            images=pixels["images"],
            videos=pixels["videos"],
            task=format,
            max_new_tokens=BENCHMARK_TOKENS,
        )

    def answered(self) -> AnsweredPrompt | None:
        """The conversation from the first question on, up to an empty message or an unknown speaker. If it ends with an
        answer, this is the example's; otherwise the target writes one.
        """
        known = itertools.takewhile(lambda said: said.speaker in _ROLES and said.value.strip(), self.conversations)
        messages = [_message(_ROLES[said.speaker], said.value) for said in known]
        messages = list(itertools.dropwhile(lambda message: message["role"] == "assistant", messages))
        if all(message["role"] != "user" for message in messages):
            return None
        pixels = {"images": [*self.image, *self.images], "videos": [*self.video, *self.videos]}
        return AnsweredPrompt.model_validate({"messages": messages, **pixels, "max_new_tokens": BENCHMARK_TOKENS})


def _message(role: str, text: str) -> dict[str, Any]:
    """A message; text with markers of LLaVA's data is parts."""
    parts = [_marked_part(piece).model_dump() for piece in _MARKER.split(text) if piece.strip()]
    return {"role": role, "content": parts if len(parts) > 1 else text}


def _marked_part(piece: str) -> Part:
    """A part of a message of LLaVA's data: a marker, or text, whose line break at the marker belongs to the marker."""
    if _MARKER.fullmatch(piece):
        return Part(type="image" if piece == "<image>" else "video")
    return Part(type="text", text=piece.strip("\n"))


class _HumanEval(_Row):
    text: Text = Field(alias="prompt")

    def prompt(self, format: Format) -> Prompt:
        return _conversation([self.text], task=format)


class _Gsm8k(_Row):
    question: Text
    answer: str

    def prompt(self, format: Format) -> Prompt:
        return _conversation([self.question], task=format)


_READERS: dict[Format, type[_Row]] = {
    "mt-bench": _Question,
    "spec-bench": _Question,
    "mmspec": _Mmspec,
    "speed-bench": _SpeedBench,
    "vllm": _Vllm,
    "sharegpt": _ShareGpt,
    "humaneval": _HumanEval,
    "gsm8k": _Gsm8k,
}


def _conversation(turns: list[str], *, task: str, images: Sequence[str] = (), videos: Sequence[str] = ()) -> Prompt:
    asked: dict[str, Any] = {"prompt": turns[0]} if len(turns) == 1 else {"turns": turns}
    return Prompt(**asked, images=list(images), videos=list(videos), task=task, max_new_tokens=BENCHMARK_TOKENS)
