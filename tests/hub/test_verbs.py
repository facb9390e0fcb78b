"""Public models by their ids through every verb: each prompt has the tokens that transformers makes of it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from autotune.cli.main import main
from autotune.measuring.settings import CostSettings
from autotune.modeling import tree_model
from autotune.modeling.loading import load_processor
from autotune.modeling.prompt import token_rows
from autotune.search import thresholds
from autotune.serve.requests import ChatRequest, parse_request
from tests.hub.server import Hub
from tests.sample_documents import write_image

QUESTIONS = (
    "Why is the sky blue?",
    "Count to ten.",
    "Read the table row by row.",
    "Name a fox.",
    "Say nine.",
    "Go on.",
)
SPACE = """
schema: autotune.search-space/1
name: small
visual_keep: [1.0]
trees:
  chain: {depth: {low: 1, high: 3}}
"""
# One model of each family of templates; the first three are searched, too.
SEARCHED = ("meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-1b-it", "Qwen/Qwen2.5-VL-7B-Instruct")
FAMILIES = (
    *SEARCHED,
    *("Qwen/Qwen3-0.6B", "mistralai/Mistral-Nemo-Instruct-2407", "microsoft/Phi-3-mini-4k-instruct"),
    *("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "HuggingFaceTB/SmolLM2-135M-Instruct", "zai-org/GLM-4.5"),
    *("openai/gpt-oss-20b", "llava-hf/llava-v1.6-mistral-7b-hf", "Qwen/Qwen3.5-27B"),
)


def write_job(folder: Path, *, has_image: bool) -> None:
    """Six prompts of 8 tokens, and a small space."""
    images = [write_image(folder / "picture.png", 0)] if has_image else []
    splits = ["tune", "evaluate"] * 3
    rows = [
        {"prompt": question, "images": images, "max_new_tokens": 8, "split": split}
        for question, split in zip(QUESTIONS, splits, strict=True)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "small.yaml").write_text(SPACE)


def tokens_of_transformers(processor: Any, folder: Path) -> set[tuple[int, ...]]:
    """The ids of all prompts, as ``apply_chat_template`` makes them."""
    picture = folder / "picture.png"
    rows = set()
    for question in QUESTIONS:
        content: Any = question
        if picture.exists():
            content = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": question}]
        ids = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        rows.add(tuple(ids[0] if isinstance(ids[0], list) else ids))
    return rows


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The tokens of all prompts that a target or draft reads from now on."""
    seen: list[tuple[int, ...]] = []
    encode = tree_model.encode

    def note(model: Any, text: Any, inputs: dict[str, Any]) -> Any:
        seen.extend(tuple(row.tolist()) for row in token_rows(inputs))
        return encode(model, text, inputs)

    monkeypatch.setattr(tree_model, "encode", note)
    return seen


def run(*words: object) -> str:
    result = CliRunner().invoke(main, list(map(str, words)), standalone_mode=False, catch_exceptions=False)
    assert result.return_value in (None, 0), result.output
    return result.output


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in SEARCHED)) for name in FAMILIES]
)
def test_every_verb_reads_the_tokens_of_transformers(
    name: str, public_hub: Hub, encoded: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(CostSettings, "time_limit_s", 3.0)  # of a budget that a busy machine keeps too
    monkeypatch.setattr(thresholds, "MAX_PASSES", 1)
    processor = load_processor(name)
    write_job(tmp_path, has_image=hasattr(processor, "image_processor"))
    expected = tokens_of_transformers(processor, tmp_path)
    common = ("--target", name, "--draft", "retrieval", "--workload", "prompts.jsonl")

    def verb(*words: object) -> str:
        encoded.clear()
        output = run(*words)
        assert encoded and all(is_made_of(row, expected) for row in encoded), f"{words[0]} reads other tokens"
        return output

    verb("record", *common, "-o", "traces")
    verb("search", *common, "--space", "small.yaml", "--trials", "2", "--budget", "1h", "-o", "profile.json")
    verb("run", "profile.json", "--workload", "prompts.jsonl")
    verb("bench", "profile.json", "--workload", "prompts.jsonl", "--draft", "retrieval", "--arms", "ar,hf,chain")
    verb("check", "profile.json", "--workload", "prompts.jsonl")
    assert {tuple(row) for row in served(processor, tmp_path)} == expected, "serve reads other tokens"


def is_made_of(row: tuple[int, ...], prompts: set[tuple[int, ...]]) -> bool:
    """Whether a row is a prompt, or the end of a repeated one: prefills of other lengths are timed, too."""
    return any(row == (prompt * (1 + len(row) // len(prompt)))[-len(row) :] for prompt in prompts)


def served(processor: Any, folder: Path) -> list[list[int]]:
    """The ids that the server makes of the same questions in the form of OpenAI's API."""
    picture = folder / "picture.png"
    rows = []
    for question in QUESTIONS:
        content: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if picture.exists():
            url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
        asked = parse_request(ChatRequest, body)
        rows.append(asked.inputs(processor, "cpu")["input_ids"][0].tolist())
    return rows
