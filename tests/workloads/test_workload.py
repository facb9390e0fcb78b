"""Workloads: JSONL files and their error messages, splits, hashes, processor inputs and the bundled digits."""

from __future__ import annotations

import io
import json
import struct
import zlib
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from PIL import Image

from autotune.documents.decoding_profile import WorkloadReference
from autotune.errors import UserError
from autotune.workloads.chat import chat_for
from autotune.workloads.pixels import load_image
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import SHIPPED, Workload, WorkloadSplit, load_workload, shipped_files
from tests.sample_documents import write_image, write_workload
from tests.tiny_models import NUM_VISUAL_TOKENS


def names(workload: Workload) -> list[str]:
    return [prompt.name for prompt in workload.prompts]


def test_line_is_a_prompt(tmp_path: Path) -> None:
    """Image paths are relative to the file; omitted keys have defaults; empty lines are skipped."""
    (tmp_path / "images").mkdir()
    write_image(tmp_path / "images" / "a.png", 0)
    full = {"prompt": "What?", "images": ["images/a.png"], "task": "see", "max_new_tokens": 9, "temperature": 0.5}
    path = write_workload(
        tmp_path, [{**full, "top_k": 7, "top_p": 0.9, "seed": 3, "split": "tune"}, "", {"prompt": "x", "split": "tune"}]
    )
    first, second = load_workload(str(path), "tune").prompts
    assert first.settings.generation == {"max_new_tokens": 9, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 3}
    assert (first.name, first.settings.task, first.pixels[0].size) == ("workload.jsonl:1", "see", (32, 32))
    unset = {"max_new_tokens": 128, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    assert second.settings.generation == unset
    assert (second.name, second.settings.task, second.pixels) == ("workload.jsonl:3", "prompt", ())


def test_prompts_without_a_split_alternate(tmp_path: Path) -> None:
    """No prompt is in both splits; an explicit split is kept."""
    path = write_workload(tmp_path, [{"prompt": str(number)} for number in range(7)])
    tune, evaluate = (load_workload(str(path), split) for split in ("tune", "evaluate"))
    assert [p.settings.prompt for p in tune.prompts] == ["0", "2", "4", "6"]
    assert [p.settings.prompt for p in evaluate.prompts] == ["1", "3", "5"]
    marked = write_workload(
        tmp_path, [{"prompt": "0", "split": "evaluate"}, {"prompt": "1", "split": "tune"}, {"prompt": "2"}]
    )
    assert [p.settings.prompt for p in load_workload(str(marked), "tune").prompts] == ["1", "2"]
    assert [p.settings.prompt for p in load_workload(str(marked), "evaluate").prompts] == ["0"]


def test_evaluation_prompts_are_not_used_for_tuning(tmp_path: Path) -> None:
    """A prompt in both splits is for evaluation; training prompts are in neither split."""
    lines = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "b"}, {"prompt": "c", "split": "train"}, {"prompt": "d"}]
    path = str(write_workload(tmp_path, lines))
    tune, evaluate = (load_workload(path, split).prompts for split in ("tune", "evaluate"))
    assert [[p.settings.prompt for p in prompts] for prompts in (tune, evaluate)] == [["a", "d"], ["b"]]
    duplicate = str(write_workload(tmp_path, [{"prompt": "b", "split": "tune"}, {"prompt": "b", "split": "evaluate"}]))
    with pytest.raises(UserError, match="needs prompts in both splits; none is in 'tune'"):
        load_workload(duplicate, "tune")


def test_chat_uses_the_template_of_the_processor(tmp_path: Path, processor: Any) -> None:
    """A single user message equals a prompt. Images are at the positions of the image parts, or else first."""
    write_image(tmp_path / "a.png", 0)
    image = {"images": ["a.png"], "split": "tune"}

    def text(line: dict[str, Any]) -> str:
        (prompt,) = load_workload(str(write_workload(tmp_path, [{**image, **line}])), "tune").prompts
        chat = chat_for(processor, prompt.content, num_images=len(prompt.pixels))
        return str(processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))

    plain = text({"prompt": "What is this?"})
    assert text({"messages": [{"role": "user", "content": "What is this?"}]}) == plain
    parts = [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "this?"}]
    placed = text({"messages": [{"role": "user", "content": parts}]})
    assert placed != plain and placed.count("<image>") == plain.count("<image>") == 1
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": "A seven."},
        {"role": "user", "content": "And next to it?"},
    ]
    rendered = text({"messages": chat})
    positions = [rendered.index(message["content"]) for message in chat if message["role"] != "system"]
    assert (
        positions == sorted(positions) and rendered.index("<image>") < positions[0] and rendered.count("<image>") == 1
    )
    (prompt,) = load_workload(str(write_workload(tmp_path, [{**image, "messages": chat}])), "tune").prompts
    assert prompt.settings.text == "And next to it?"
    assert prompt.inputs(processor)["input_ids"].shape[1] > NUM_VISUAL_TOKENS
    again = replace(prompt, settings=Prompt.model_validate(prompt.settings.model_dump()))
    assert again.sha256 == prompt.sha256


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", "every line must be a JSON object"),
        ('{"prompt": "cut off', "every line must be a JSON object"),
        ('["a list"]', "the document: .*got \\['a list'\\]"),
        pytest.param({"promt": "What?"}, "unknown key 'promt'; did you mean 'prompt'"),
        ({"prompt": "x", "image": "a.png"}, "unknown key 'image'; did you mean 'images'"),
        ({"task": "x"}, "either prompt or messages; give one of them"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either prompt or messages"),
        ({"messages": []}, "messages: .*at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role: .*'system', 'user' or 'assistant'; got 'robot'"),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "must end with the user's turn; drop the assistant's last message",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "1 image parts for 0 images; give one part for each",
        ),
        ({"prompt": "x", "split": "test"}, "split: .*'tune', 'evaluate' or 'train'; got 'test'"),
        ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens: .*greater than or equal to 1; got 0"),
        ('{"prompt": "x", "temperature": NaN}', "NaN is not a finite number"),
    ],
)
def test_invalid_line_is_reported_with_its_number(line: Any, message: str, tmp_path: Path) -> None:
    path = write_workload(tmp_path, [{"prompt": "fine"}, line])
    with pytest.raises(UserError, match=message) as error:
        load_workload(str(path), "tune")
    assert str(error.value).startswith(f"{path}:2: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("workload.jsonl", b"", "the file is empty; add a line such as"),
        ("workload.jsonl", b"\n  \n", "the file is empty; add a line such as"),
        ("workload.jsonl", b'{"prompt": "x"}', "prompts in both splits; none is in 'evaluate'; add prompts, or mark"),
        ("workload.jsonl", b'{"prompt": "x", "images": ["no.png"]}', r"no\.png: not a readable image .*No such file"),
        ("latin.jsonl", '{"prompt": "\u00e9"}'.encode("latin-1"), "cannot be read as text"),  # JSON is UTF-8
        ("", None, "cannot be read as text"),
        ("nowhere.jsonl", None, r"nowhere\.jsonl: no such file"),
        ("digit", None, "digit: no such file"),
    ],
)
def test_files_that_are_no_workload(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_workload(str(tmp_path / name), "evaluate")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chta", {}, "no such file, and 'chta' is no shipped set of prompts; did you mean 'chat'?"),
        ("chat,cod", {}, "'cod' is no shipped set of prompts; did you mean 'code'?"),
        ("digit", {}, "did you mean 'digits'?"),
        ("digits,chat", {}, "'digits' is no shipped set of prompts; known: chat, code, images, summarize"),
        ("chat,", {}, "no such file"),
        ("digits", {"is_whole": True}, "--whole: .*'digits' is bundled; leave --whole out"),
    ],
)
def test_names_of_no_workload(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_workload(name, "tune", **options)
    assert "\n" not in str(error.value)


def png(chunk: bytes, content: bytes) -> bytes:
    """A PNG with a further chunk before its pixels."""
    whole = io.BytesIO()
    Image.new("RGB", (4, 4)).save(whole, "PNG")
    packed = struct.pack(">I", len(content)) + chunk + content + struct.pack(">I", zlib.crc32(chunk + content))
    return whole.getvalue()[:33] + packed + whole.getvalue()[33:]


@pytest.mark.parametrize("kind", ["text", "empty", "cut", "folder", "zTXt", "iTXt", "iCCP"])
def test_unreadable_image(kind: str, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    write_image(image, 0)
    bomb = zlib.compress(bytes(1 << 26))  # a text of 64 MiB
    content = {
        "text": b"no image at all",
        "empty": b"",
        "cut": image.read_bytes()[:300],
        "zTXt": png(b"zTXt", b"key\0\0" + bomb),
        "iTXt": png(b"iTXt", b"key\0\1\0\0\0" + bomb),
        "iCCP": png(b"iCCP", b"key\0\0" + bomb),
    }.get(kind)
    if content is None:
        image.unlink()
        image.mkdir()
    else:
        image.write_bytes(content)
    path = write_workload(tmp_path, [{"prompt": "x", "images": ["a.png"]}])
    with pytest.raises(UserError, match=r"a\.png: not a readable image .*; give a PNG or JPEG file"):
        load_workload(str(path), "tune")


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    for separator in ("\u2028", "\x85"):
        path.write_text(json.dumps({"prompt": f"one{separator}two"}, ensure_ascii=False) + "\n", encoding="utf-8")
        assert load_workload(str(path), "tune").prompts[0].settings.prompt == f"one{separator}two"


def test_hash_covers_everything_that_determines_the_answer(tmp_path: Path) -> None:
    """Prompt, settings and pixels; not the image's name, the split or the line number."""
    write_image(tmp_path / "a.png", 0)
    write_image(tmp_path / "b.png", 1)
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    base = {"prompt": "x", "images": ["a.png"], "split": "tune"}
    changes = [{"prompt": "y"}, {"images": ["b.png"]}, {"images": []}, {"images": ["a.png", "b.png"]}]
    changes += [{"max_new_tokens": 9}, {"temperature": 1.0}, {"top_p": 0.5}, {"seed": 4}]
    path = write_workload(tmp_path, [base, {**base, "images": ["copy.png"]}, *({**base, **c} for c in changes)])
    hashes = [prompt.sha256 for prompt in load_workload(str(path), "tune").prompts]
    assert hashes[0] == hashes[1] and len({*hashes}) == 1 + len(changes)
    evaluate = write_workload(tmp_path, [{**base, "split": "evaluate"}])
    assert load_workload(str(evaluate), "evaluate").prompts[0].sha256 == hashes[0]


def test_inputs_are_made_by_the_processor(processor: Any, tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 0)
    path = write_workload(
        tmp_path, [{"prompt": "What?", "images": ["a.png"], "split": "tune"}, {"prompt": "x", "split": "tune"}]
    )
    with_image, without_image = (prompt.inputs(processor) for prompt in load_workload(str(path), "tune").prompts)
    image_token = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert int((with_image["input_ids"] == image_token).sum()) == NUM_VISUAL_TOKENS
    assert with_image["pixel_values"].shape == (1, 3, 32, 32) and "pixel_values" not in without_image
    assert processor.decode(without_image["input_ids"][0]) == "USER: x ASSISTANT:"


def test_names_of_images_that_no_file_has(tmp_path: Path) -> None:
    for name in ("a\0b.png", "\ud800.png", "a" * 5000):
        with pytest.raises(UserError, match="not a readable image"):
            load_image(tmp_path / name)
    path = write_workload(tmp_path, [r'{"prompt": "x", "task": "\ud800"}'])
    with pytest.raises(UserError, match=r"workload\.jsonl:1: every line must be a JSON object .*hex escape"):
        load_workload(str(path), "tune")


def test_text_and_templates_that_the_processor_refuses(processor: Any) -> None:
    """Text that is not Unicode, as a shell passes bytes; a template with an error, and one that raises."""
    for text, template in (
        ("\udcff\udcfe", None),
        ("x", "{% for"),
        ("x", "{{ raise_exception('no') }}"),
        ("x", "{{ 1 / 0 }}"),
    ):
        changed = deepcopy(processor.tokenizer)
        changed.chat_template = template
        with pytest.raises(
            UserError, match=r"^prompt: the processor refuses the prompt \(.+\); fix its text"
        ) as caught:
            WorkloadPrompt("prompt", Prompt(prompt=text), ()).inputs(changed)
        assert "\n" not in str(caught.value)


def test_image_for_a_text_model(processor: Any, tmp_path: Path) -> None:
    """The processor of a text model is its tokenizer."""
    write_image(tmp_path / "a.png", 0)
    path = write_workload(
        tmp_path, [{"prompt": "x", "images": ["a.png"], "split": "tune"}, {"prompt": "x", "split": "tune"}]
    )
    with_image, without_image = load_workload(str(path), "tune").prompts
    with pytest.raises(UserError, match=r"workload\.jsonl:1: the prompt has an image, but the target reads text only"):
        with_image.inputs(processor.tokenizer)
    assert processor.tokenizer.decode(without_image.inputs(processor.tokenizer)["input_ids"][0]) == "USER: x ASSISTANT:"


def test_prompts_as_a_search_decoded_them() -> None:
    whole = load_workload("digits", "evaluate", num_prompts=3)
    found = WorkloadReference(
        name="digits", tune_sha256="", evaluate_sha256="", num_tune_prompts=1, num_evaluate_prompts=3
    )
    assert whole.as_searched(found).sha256 == whole.sha256
    changed = whole.as_searched(found.model_copy(update={"temperature": 0.7, "max_new_tokens": 16}))
    assert changed.sha256 == whole.sampled(0.7).cut(3, 16).sha256 != whole.sha256


@pytest.mark.parametrize(
    ("name", "split", "num_prompts", "sha256"),
    [
        ("digits", "tune", 64, "27704c0f69fad72fd64327b255453a2aacde746a47894b28a19f3ce3ec1669e0"),
        ("digits", "evaluate", 64, "1523fad15f18b13e57e515e41e8881c74816bb91df4baa59a4bed69f3ebe8e40"),
    ],
)
def test_bundled_workloads_are_frozen(name: str, split: WorkloadSplit, num_prompts: int, sha256: str) -> None:
    """The hashes that shipped profiles and published measurements name."""
    workload = load_workload(name, split)
    assert (workload.name, len(workload.prompts), workload.sha256) == (name, num_prompts, sha256)


def test_tasks_of_the_bundled_workload_alternate() -> None:
    """The first prompts cover all tasks, and a larger number adds prompts at the end."""
    first = load_workload("digits", "tune", num_prompts=8)
    assert first.tasks == ["read", "count", "sum", "sort", "add", "multiply", "describe", "continue"]
    assert [bool(prompt.pixels) for prompt in first.prompts] == [task != "continue" for task in first.tasks]
    assert names(load_workload("digits", "tune", num_prompts=13))[:8] == names(first)


def test_shipped_sets_are_named_in_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their prompts are taken in turn, a file of that name wins, and a folder of that name does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    for split in get_args(WorkloadSplit):
        workload = load_workload("chat,code", split, num_prompts=4)
        assert workload.name == "chat,code" and workload.tasks == ["chat", "code"]
        assert [prompt.settings.task for prompt in workload.prompts] == ["chat", "code"] * 2
    (tmp_path / "chat").write_text("\n".join(json.dumps({"prompt": one}) for one in "ab"))
    assert [prompt.settings.prompt for prompt in load_workload("chat", "tune").prompts] == ["a"]


def test_shipped_prompts_are_whole_small_and_have_both_splits() -> None:
    """Every prompt is of its set's task, no photo is in both splits, and the images are at most 3 MB."""
    photos = {}
    for name in SHIPPED:
        splits = {split: load_workload(name, split).prompts for split in get_args(WorkloadSplit)}
        assert {prompt.settings.task for prompts in splits.values() for prompt in prompts} == {name}
        assert all(len(prompts) >= 15 for prompts in splits.values())
        assert all(96 <= prompt.settings.max_new_tokens <= 256 for prompts in splits.values() for prompt in prompts)
        photos = {
            split: {path for prompt in prompts for path in prompt.settings.images} for split, prompts in splits.items()
        }
    assert photos["tune"] and not photos["tune"] & photos["evaluate"]
    (folder,) = {path.parent for path in shipped_files(",".join(SHIPPED))}
    assert sum(path.stat().st_size for path in (folder / "images").iterdir()) < 3_000_000
    sources = (folder / "README.md").read_text()
    assert all(f"`{path.name}`" in sources for path in (folder / "images").iterdir())
