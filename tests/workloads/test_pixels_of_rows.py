"""Rows whose images stand where other tools write them: LLaVA's data, and parts as Qwen and OpenAI write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.workloads.formats import read_prompts
from autotune.workloads.prompt import Prompt
from autotune.workloads.workload import load_workload
from tests.sample_documents import write_image


def llava_row(first: str, *later: str, **pixels: Any) -> dict[str, Any]:
    turns = [first, *later]
    said = [{"from": speaker, "value": text} for turn in turns for speaker, text in (("human", turn), ("gpt", "Yes."))]
    return {"id": "000", **pixels, "conversations": said}


def prompt_of(tmp_path: Path, row: dict[str, Any]) -> Prompt:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([row]))
    ((_, prompt),) = read_prompts(path)[1]
    return prompt


IMAGE = {"images": ["a.png"]}


def ask(*texts: str) -> dict[str, Any]:
    """A message of texts and markers."""
    kinds = {"<image>": "image", "<video>": "video"}
    parts = [{"type": kinds[text], "text": ""} if text in kinds else {"type": "text", "text": text} for text in texts]
    return {"messages": [{"role": "user", "content": parts}]}


ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (llava_row("<image>\nWhat is this?", image="a.png"), {**IMAGE, **ask("<image>", "What is this?")}),
    (
        llava_row("Compare <image> with\n<image>", image=["a.png", "b.png"]),
        {"images": ["a.png", "b.png"], **ask("Compare ", "<image>", " with", "<image>")},
    ),
    (llava_row("So?\n<video>", video="a.mp4"), {"videos": ["a.mp4"], **ask("So?", "<video>")}),
    # Later turns follow up to one with images of its own.
    (
        llava_row("<image>\nWhat is this?", "And that?", "Now <image>?", "Why?", image=["a.png", "b.png"]),
        {**IMAGE, "turns": ["What is this?", "And that?"]},
    ),
    (llava_row("Why?", "And now?"), {"turns": ["Why?", "And now?"]}),
    (llava_row("Why?", image=None), {"prompt": "Why?"}),
]


@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_rows_of_llavas_data_are_prompts(row: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = prompt_of(tmp_path, row).model_dump(exclude_defaults=True, exclude={"task", "split", "max_new_tokens"})
    assert found == Prompt(**expected).model_dump(exclude_defaults=True)


def test_rows_with_fewer_markers_than_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.json:1: .*1 markers for 2 images and videos; give one for each"):
        prompt_of(tmp_path, llava_row("<image> Why?", image=["a.png", "b.png"]))


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"question": "How many?", "answer": "2", "image": "a.png"}, "image"),
        ({"question_id": 1, "category": "math", "turns": ["?"], "images": ["a.png"]}, "images"),
        ({"task_id": "H/0", "prompt": "def f():", "video": "a.mp4"}, "video"),
        (llava_row("Why?", audio="a.wav"), "audio"),
    ],
)
def test_pixels_under_keys_that_a_format_does_not_read_are_refused(
    row: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"data.json:1: .*the row has '{key}', which this format does not read"):
        prompt_of(tmp_path, row)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": "a.png"},
    ],
)
def test_parts_name_their_images_as_qwens_tools_and_openai_do(part: dict[str, Any], tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 1)
    message = {"role": "user", "content": [{"type": "text", "text": "What"}, part, {"type": "text", "text": "?"}]}
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [message]}))
    (prompt,) = load_workload(str(path), "tune", is_whole=True).prompts
    assert prompt.settings.messages == Prompt(**IMAGE, **ask("What", "<image>", "?")).messages
    assert len(prompt.images) == 1


def test_an_image_is_named_in_one_place(tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    with pytest.raises(ValueError, match="messages name their images, and so does 'images'"):
        Prompt.model_validate({"messages": [message], "images": ["b.png"]})
