"""The tokens of a chat are those of transformers' ``apply_chat_template(..., tokenize=True)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing

from autotune.errors import UserError
from autotune.workloads.chat import Message, Part
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.families import BOS, FAMILIES, new_tokenizer, token_id

TURNS = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[a] {% endif %}"
PARTS = (
    "{% for m in messages %}[{{ m['role'] }}]{% for p in m['content'] %}"
    "{{ p['text'] if p['type'] == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}\n{% endfor %}"
)
THINKING = "{% if enable_thinking is defined and not enable_thinking %}none{% endif %}"
PUBLISHED = sorted((Path(__file__).parents[1] / "hub" / "published").glob("*/chat_template.jinja"))
TEMPLATES = {
    "without-bos": TURNS,
    "bos": "{{ bos_token }}" + TURNS,
    "bos-and-variable": "{{ bos_token }}" + TURNS + THINKING,
    "named": {"default": "{{ bos_token }}" + TURNS, "tool_use": TURNS},
    **{path.parent.name: path.read_text() for path in PUBLISHED},
}
CHATS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "Why is the sky blue?"},
    "system": {"messages": [Message(role="system", content="Be brief."), Message(role="user", content="Why?")]},
    "turns": {"turns": ["Why?", "And at night?"]},
}


def bos_tokenizer(template: Any) -> Any:
    """A tokenizer that begins texts with BOS, as Llama's does."""
    tokenizer = new_tokenizer()
    ids = [(BOS, token_id(BOS))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=ids
    )
    tokenizer.chat_template = template
    return tokenizer


def tokens_of(prompt: WorkloadPrompt, processor: Any) -> list[int]:
    found: list[int] = prompt.inputs(processor)["input_ids"][0].tolist()
    return found


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_of_chats(template: str, chat: str) -> None:
    tokenizer = bos_tokenizer(TEMPLATES[template])
    settings = Prompt(**CHATS[chat])
    prompt = WorkloadPrompt("p", settings, (), answers=("Air.",) if settings.turns else ())
    content = prompt.content
    messages = (
        [{"role": "user", "content": content}]
        if isinstance(content, str)
        else [{"role": message.role, "content": message.text} for message in content]
    )
    try:
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    except Exception:  # a template without a system role, or of a model that reads parts alone
        with pytest.raises(UserError, match="the processor refuses the prompt"):
            tokens_of(prompt, tokenizer)
        return
    assert tokens_of(prompt, tokenizer) == expected


def test_text_without_a_template_keeps_special_tokens() -> None:
    tokenizer = bos_tokenizer(None)
    assert tokens_of(WorkloadPrompt("p", Prompt(prompt="Why?"), ()), tokenizer)[0] == token_id(BOS)


@pytest.mark.parametrize("bos", ["", "{{ bos_token }}"])
def test_tokens_and_pixels_of_images(bos: str) -> None:
    processor = FAMILIES["qwen2_5_vl"].processor()
    processor.tokenizer.backend_tokenizer.post_processor = bos_tokenizer(None).backend_tokenizer.post_processor
    processor.chat_template = bos + PARTS
    images = tuple(Image.new("RGB", size, colour) for size, colour in (((24, 40), "red"), ((48, 24), "blue")))
    parts = [Part(type="image"), Part(type="text", text="Left?"), Part(type="image")]
    settings = Prompt(messages=[Message(role="user", content=parts)], images=["a", "b"])
    found = WorkloadPrompt("p", settings, images).inputs(processor)
    first, second = ({"type": "image", "image": image} for image in images)
    messages = [{"role": "user", "content": [first, {"type": "text", "text": "Left?"}, second]}]
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    expected = processor.apply_chat_template(messages, return_tensors="pt", **options)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)
    assert int((found["input_ids"] == token_id(BOS)).sum()) == 1  # transformers adds it where the template does not


def test_variables_of_templates() -> None:
    tokenizer = bos_tokenizer(TURNS + THINKING)
    plain, other = (WorkloadPrompt("p", Prompt(prompt=text), ()) for text in ("Why?", "Who?"))
    off = plain.with_variables({"enable_thinking": False})
    assert tokenizer.decode(tokens_of(off, tokenizer)).endswith("none")
    assert tokens_of(plain, tokenizer) != tokens_of(off, tokenizer)
    assert plain.sha256 != off.sha256 and plain.with_variables({}).sha256 == plain.sha256
    assert off.with_variables({"enable_thinking": True, "more": 1}).settings.chat_template_kwargs == {
        "enable_thinking": False,
        "more": 1,
    }
    said: list[str] = []
    workload = Workload("w", "tune", (off.with_variables({"thinkin": 1}), other)).fitting(tokenizer, 4096, said.append)
    assert len(workload.prompts) == 2 and len(said) == 1 and "does not use thinkin" in said[0]
    assert tokens_of(workload.prompts[0], tokenizer) == tokens_of(off, tokenizer)
    with pytest.raises(ValidationError, match="'tokenize' is not a variable"):
        Prompt(prompt="x", chat_template_kwargs={"tokenize": False})
    with pytest.raises(ValidationError):
        Prompt(prompt="x", chat_template_kwargs={"a": object()})  # type: ignore[dict-item]


def test_prompts_longer_than_the_context_are_left_out() -> None:
    tokenizer, said = bos_tokenizer(TURNS), list[str]()
    short, long = Prompt(prompt="Why?", max_new_tokens=8), Prompt(prompt="row by row " * 60, max_new_tokens=8)
    turns = Prompt(turns=["Why?"] * 12, max_new_tokens=8)  # its later answers may be too long together
    prompts = tuple(WorkloadPrompt(f"w:{n}", settings, ()) for n, settings in enumerate((short, long, turns)))
    kept = Workload("w", "tune", prompts).fitting(tokenizer, 96, said.append)
    assert [prompt.name for prompt in kept.prompts] == ["w:0"]
    assert len(said) == 1 and "2 of 3 prompts are longer and left out: w:1 (" in said[0] and "w:2 (" in said[0]
    with pytest.raises(UserError, match="all 1 prompts are longer: w:1"):
        Workload("w", "tune", prompts[1:2]).fitting(tokenizer, 96, said.append)
