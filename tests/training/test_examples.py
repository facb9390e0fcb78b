"""Training examples from a file: answers, batches, held-out lines and error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import NETWORKS, load_draft, load_network
from autotune.drafters.feature_draft import FeatureDraft
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.runtime.decoder import Decoder
from autotune.training.examples import JsonlExamples, Line, at_temperatures, read_examples, split_file
from autotune.training.recipe import require_trainable
from autotune.training.teacher import Teacher
from autotune.training.trainer import train
from autotune.workloads.formats import read_answered
from autotune.workloads.prompt import load_prompt
from autotune.workloads.workload import load_workload
from tests.families import FAMILIES, Family, load, load_processor, random_picture, save
from tests.obvious import refused
from tests.tiny_models import Pair
from tests.training.conftest import STAGE


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "examples.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def numbered(number: int, **more: Any) -> list[dict[str, Any]]:
    """Lines of growing length."""
    return [{"prompt": "Count. " * (1 + i), "answer": f"{i}", **more} for i in range(number)]


@pytest.fixture
def recorder(pair: Pair, processor: Any, tmp_path: Path) -> Recorder:
    return Recorder(Target(pair.target), reference(str(pair.target_folder)), processor, tmp_path / "records")


def read(path: Path, recorder: Recorder, **options: Any) -> tuple[list[Line], list[Line]]:
    """Training lines and held-out lines."""
    training, held_out = split_file(path, **{"batch_size": 1, **options})
    lines = read_examples(path, [*training, *held_out], recorder, Accelerator())
    return lines[: len(training)], lines[len(training) :]


# -------- answers


def chat_template(family: Family) -> str | None:
    """A template with the family's image placeholder; None for a text model, which gets the prompt unchanged."""
    if not family.sees:
        return None
    return (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + family.placeholders["image"]
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )


# SmolVLM's template requires a video processor, which needs torchvision.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "smolvlm"])
def test_teacher_outputs_equal_what_each_family_generates(name: str, tmp_path: Path) -> None:
    """The teacher's most probable tokens along the generated answers equal ``model.generate`` of each prompt alone. The
    batch has prompts with no, one and several images.
    """
    family = FAMILIES[name]
    save(family, tmp_path)
    model, processor = load(tmp_path / "target"), load_processor(family, tmp_path / "target")
    processor.chat_template = chat_template(family)
    rng = np.random.default_rng(1)
    images = [f"{number}.png" for number in range(2)]
    for image in images:
        random_picture(rng, (40, 30)).save(tmp_path / image)
    prompts = ["What is 2 + 2?", "Describe the picture, please.", "Compare both of these.", "Frame 12 shows"]
    images_of = [images[:1], images[1:], images, []] if family.sees else [[]] * 4
    lines = [{"prompt": p, "images": i, "max_new_tokens": 5} for p, i in zip(prompts, images_of, strict=True)]
    path = write(tmp_path, lines)
    recorder = Recorder(Target(model), reference(str(tmp_path / "target")), processor, tmp_path)
    training, held_out = read(path, recorder, batch_size=3)
    batch = JsonlExamples(training, recorder.target, processor, batch_size=3)[0]
    teacher_batch = Teacher(recorder.target).read(batch, layers=())
    last = teacher_batch.hidden[len(recorder.target.text.layers)]
    assert len(batch) == 3 and len(held_out) == 1
    for row, line in enumerate(sorted(training, key=lambda line: line.length)):
        inputs = load_prompt(path, line.number, line.settings).inputs(processor)
        with torch.no_grad():
            sequence = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0]
            teacher_logprobs = teacher_batch.head(last[row, teacher_batch.loss_mask[row]]).argmax(-1)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        assert batch[row].prompt.tokens.tolist() == sequence[:-1].tolist()
        assert teacher_logprobs.tolist() == sequence[num_prompt_tokens:].tolist()


def test_given_answer_follows_the_prompt(recorder: Recorder, processor: Any, tmp_path: Path) -> None:
    """The answer is tokenized separately, and the end of the sequence is predicted after its last token."""
    path = write(tmp_path, [{"prompt": "Read row 1.", "answer": " 3, 1, 4."}, *numbered(2)])
    training, _ = read(path, recorder)
    (example,) = JsonlExamples(training[:1], recorder.target, processor, batch_size=1)[0]
    prompt = processor.tokenizer("USER: Read row 1. ASSISTANT:")["input_ids"]
    answer = processor.tokenizer(" 3, 1, 4.", add_special_tokens=False)["input_ids"]
    assert example.prompt.tokens.tolist() == [*prompt, *answer]
    assert example.loss_start == len(prompt) - 1
    assert int(Teacher(recorder.target).read([example], layers=()).loss_mask.sum()) == len(answer) + 1


def test_answers_are_written_once_in_batches(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line keeps its own settings, and has the answer of decoding it alone: nothing is nearly tied in float32.
    Sampled ones are drawn without the noise of decoding, and do not depend on the other rows.
    """
    monkeypatch.setattr("autotune.training.examples.ROWS", 3)
    lines = [{"prompt": "Count.", "max_new_tokens": 5}, {"prompt": "Count.", "temperature": 1.0, "seed": 3}]
    lines += [
        {"prompt": "Read row 1. " * n, "max_new_tokens": 5 + n, "top_p": 0.9, "temperature": 0.5 * n} for n in (1, 2)
    ]
    path = write(tmp_path, [*lines, {"prompt": "Read row 1.", "max_new_tokens": 5}])
    sizes, together = [], recorder._answers.write_together
    monkeypatch.setattr(recorder._answers, "write_together", lambda asked: sizes.append(len(asked)) or together(asked))
    training, held_out = read(path, recorder)
    assert sizes == [3, 2] and len(list((recorder.folder / "training-answers").iterdir())) == 5
    assert read(path, recorder) == (training, held_out) and sizes == [3, 2]
    workloads = [load_workload(str(path), split) for split in ("tune", "evaluate")]
    prompts = [prompt for workload in workloads for prompt in workload.prompts]
    alone = {prompt.name: recorder._answers._alone(prompt) for prompt in prompts}
    for prompt in prompts:
        if prompt.settings.temperature and prompt.settings.top_p == 1.0:
            assert together([prompt])[0] != alone[prompt.name]
            alone[prompt.name] = together([prompt])[0]
    for line in (*training, *held_out):
        assert list(line.answer) == alone[f"examples.jsonl:{line.number}"][:-1]
    assert training[0].answer != training[1].answer[:4]


def test_answers_at_several_temperatures(recorder: Recorder, tmp_path: Path) -> None:
    """A given answer is kept, and sampled answers have seeds of their own."""
    path = write(tmp_path, [{"prompt": "Count.", "max_new_tokens": 9}] * 2 + [{"prompt": "Count.", "answer": "1"}])
    prompts = at_temperatures(split_file(path, batch_size=1, num_held_out=1)[0], [0.0, 1.0])
    assert [(n, p.temperature, p.seed) for n, p in prompts] == [(1, 0.0, 0), (1, 1.0, 1), (2, 0.0, 0), (2, 1.0, 2)]
    greedy, sampled, same, other = (line.answer for line in read_examples(path, prompts, recorder, Accelerator()))
    assert greedy == same and len({greedy, sampled, other}) == 3
    assert at_temperatures(prompts, []) == prompts


def test_answers_are_truncated_to_the_context(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is given, the second one generated."""
    monkeypatch.setattr(recorder.target, "max_context", 30)
    path = write(tmp_path, [{"prompt": "Count.", "answer": "1, 2, 3. " * 20}, {"prompt": "Count."}, *numbered(1)])
    training, _ = read(path, recorder)
    assert [line.length for line in training] == [30, 29]


# -------- batches


def test_batches_hold_every_line_once_with_similar_lengths(recorder: Recorder, processor: Any, tmp_path: Path) -> None:
    training, _ = read(write(tmp_path, numbered(30)), recorder)
    batches = JsonlExamples(training, recorder.target, processor, batch_size=4, seed=1).batches
    assert sorted(line.number for batch in batches for line in batch) == [line.number for line in training]
    assert {len(batch) for batch in batches} == {3, 4}, "sizes are nearly equal"
    assert all(batch[-1].number - batch[0].number == len(batch) - 1 for batch in batches)
    assert [batch[0].number for batch in batches] != sorted(batch[0].number for batch in batches), (
        "batches are in random order"
    )
    shares = [
        JsonlExamples(training, recorder.target, processor, batch_size=4, seed=1, share=(process, 2))
        for process in range(2)
    ]
    for number, batch in enumerate(batches):
        assert sorted([*shares[0].batches[number], *shares[1].batches[number]], key=lambda line: line.number) == batch


def split_numbers(folder: Path, lines: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
    """Line numbers of the training and the held-out prompts."""
    training, held_out = split_file(write(folder, lines), **options)
    return [number for number, _ in training], [number for number, _ in held_out]


def test_one_line_in_twenty_is_held_out_or_a_batch(tmp_path: Path) -> None:
    """The last lines are held out; at least one batch remains for training."""
    for number, batch_size, num_held_out in ((100, 2, 5), (100, 8, 8), (9, 8, 1), (2, 1, 1), (400, 390, 10)):
        lines = [{"prompt": "x", "answer": f"{i}"} for i in range(number)]
        training, held_out = split_numbers(tmp_path, lines, batch_size=batch_size)
        assert held_out == list(range(number - num_held_out + 1, number + 1))
        assert training == list(range(1, number - num_held_out + 1))


def test_evaluation_prompts_are_not_trained_on(tmp_path: Path) -> None:
    lines = [{**line, "split": "evaluate" if number % 5 == 1 else "tune"} for number, line in enumerate(numbered(20))]
    training, held_out = split_numbers(tmp_path, lines, batch_size=2, num_held_out=3)
    assert held_out == [2, 7, 12]
    assert not {*training} & {2, 7, 12, 17} and len(training) == 16
    lines[3]["split"] = lines[4]["split"] = "train"
    training, _ = split_numbers(tmp_path, lines, batch_size=2)
    assert training == [4, 5], "only lines of the split train, if there are any"


ASKED = {"role": "user", "content": "What is 2 + 3?"}
ANSWERED = {"role": "assistant", "content": "It is 5."}


def test_the_last_answer_of_a_chat_is_trained_on(tmp_path: Path) -> None:
    """Messages may end with it, in text or in parts."""
    chats = [[ASKED, ANSWERED], [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "It is 5."}]}]]
    lines = [{"messages": chat} for chat in [*chats, [ASKED, ANSWERED, ASKED]]]
    found = [prompt for _, prompt in read_answered(write(tmp_path, lines))]
    assert [prompt.answer for prompt in found] == ["It is 5.", "It is 5.", None]
    assert [[m.role for m in prompt.messages or ()] for prompt in found][1:] == [
        ["user"],
        ["user", "assistant", "user"],
    ]
    with refused(r":1: messages end with the assistant's answer, and 'answer' is another; give one of them$"):
        read_answered(write(tmp_path, [{"messages": chats[0], "answer": "5"}]))


def test_conversations_of_sharegpt_are_examples(tmp_path: Path) -> None:
    """With the file's own answers between the turns; images stand where LLaVA's data mark them."""
    turns = [("gpt", "Hello."), ("human", "Name <image> one."), ("gpt", "A cat."), ("human", "More?"), ("gpt", "No.")]
    said = [{"from": speaker, "value": text} for speaker, text in turns]
    rows = [
        {"id": "a", "image": "cat.png", "conversations": said},
        {"conversations": said[3:4]},
        {"conversations": said[:1]},
        {"conversations": [said[3], {"from": "tool", "value": "x"}, said[4]]},
    ]
    (first, second, third) = (prompt for _, prompt in read_answered(write(tmp_path, rows)))
    messages = first.messages or []
    assert [message.role for message in messages] == ["user", "assistant", "user"] and first.answer == "No."
    assert [part.type for part in messages[0].parts] == ["text", "image", "text"] and first.images == ["cat.png"]
    assert (second.text, second.answer) == (third.text, third.answer) == ("More?", None)
    with refused(r":1: .*messages have 1 image parts for 0 images; give one part for each image$"):
        read_answered(write(tmp_path, [{"conversations": said}]))


def test_num_examples_selects_the_first_lines(tmp_path: Path) -> None:
    training, _ = split_numbers(tmp_path, numbered(20), batch_size=2, num_examples=7)
    assert training == [1, 2, 3, 4, 5, 6, 7]


def test_the_cache_key_covers_the_content_of_the_lines(recorder: Recorder, processor: Any, tmp_path: Path) -> None:
    def key(lines: list[dict[str, Any]], **options: Any) -> str:
        training, _ = read(write(tmp_path, lines), recorder)
        return JsonlExamples(training, recorder.target, processor, **{"batch_size": 2, **options}).key

    lines = numbered(8)
    assert key(lines) == key(lines)
    others = [
        key([{**lines[0], "answer": "x"}, *lines[1:]]),
        key([{**lines[0], "prompt": "x"}, *lines[1:]]),
        key(lines, batch_size=3),
        key(lines, seed=1),
        key(lines, share=(0, 2)),
    ]
    assert len({key(lines), *others}) == 6


# -------- invalid input


@pytest.mark.parametrize(
    ("lines", "batch_size", "num_examples", "message"),
    [
        (numbered(4), 4, None, r"at least one batch; got 3 for 4, with 1 held out; add lines, or"),
        (numbered(9), 2, 8, r"at least num_examples lines.*got 7 for 8, with 2 held out; add lines"),
        (numbered(9, split="evaluate"), 3, None, r"at least one batch; got 0 for 3, with 9 held out; add lines"),
        ([*numbered(2), {"prompt": "x", "anwser": "y"}], 1, None, r":3: unknown key 'anwser'; did you mean 'answer'"),
    ],
)
def test_file_with_too_few_or_invalid_lines(
    lines: list[dict[str, Any]], batch_size: int, num_examples: int | None, message: str, tmp_path: Path
) -> None:
    with refused(message) as error:
        split_file(write(tmp_path, lines), batch_size=batch_size, num_examples=num_examples)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file; check the path"), ("\n", "the file is empty; add a line such as"), ("{", ":1: .*fix that")],
)
def test_missing_or_invalid_file(
    recipe: Callable[..., Path], content: str | None, message: str, tmp_path: Path
) -> None:
    """The error is raised before the target is loaded."""
    (tmp_path / "examples.jsonl").unlink()
    if content is not None:
        (tmp_path / "examples.jsonl").write_text(content)
    with refused(rf"examples\.jsonl.*{message}"):
        require_trainable(recipe())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": "Count. " * 40},
            r":1: the target's context of 60 tokens .*the prompt has \d+ tokens; shorten it or remove",
        ),
        ({"prompt": "<image> What?"}, r":1: the processor refuses the prompt .*; fix its text, images"),
        (
            {"prompt": "x", "answer": "<image>"},
            r":1: the text has tokens of images or videos beside those of the line's own",
        ),
        ({"prompt": "x", "images": ["gone.png"]}, r"gone\.png: not a readable image .*No such file"),
    ],
)
def test_line_that_the_target_cannot_read(
    recorder: Recorder, line: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder.target, "max_context", 60)
    with refused(message):
        read(write(tmp_path, [line, *numbered(2)]), recorder)


def test_documented_example_trains(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of docs/training.md repeated, and its recipe with a tiny target and few steps."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (lines,) = re.findall(r"^```jsonl\n(.*?)^```", page, re.M | re.S)
    (recipe,) = (block for block in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S) if "teacher" in block)
    (tmp_path / "receipts").mkdir()
    random_picture(np.random.default_rng(0), (40, 30)).save(tmp_path / "receipts" / "1.png")
    (tmp_path / "examples.jsonl").write_text(re.sub("256", "16", lines) * 9)
    recipe = re.sub(r"steps: \d+", "steps: 1", recipe).replace("Qwen/Qwen2.5-VL-7B-Instruct", str(pair.target_folder))
    (tmp_path / "recipe.yaml").write_text(recipe.replace("mlp_size: 4096", "mlp_size: 64"))
    train(tmp_path / "recipe.yaml")
    assert {"model.safetensors", "config.json", "training.jsonl"} <= {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize("model", ["eagle3", "mtp"])
def test_a_draft_is_trained_over_the_most_frequent_tokens(
    model: str, recipe: Callable[..., Path], pair: Pair, processor: Any, tmp_path: Path
) -> None:
    """They are those of the answers that are trained on. An eagle3 head has no others, and an mtp head proposes no
    others.
    """
    answers = ["Row 1 reads 3, 1, 4.", "Row 2 reads 1.", "Row 1", "4, 4, 4"]
    lines = [{"prompt": "Count.", "answer": answer, "split": "train"} for answer in answers]
    write(tmp_path, [*lines, {"prompt": "Count.", "answer": "never", "split": "evaluate"}])
    tokens = [token for answer in answers for token in processor.tokenizer(answer)["input_ids"]]
    target, size = Target(pair.target), 60
    counted = np.bincount(tokens, minlength=target.vocab_size).tolist()
    frequent = sorted(sorted(range(target.vocab_size), key=lambda token: (-counted[token], token))[:size])
    changes: dict[str, Any] = {"model": model, "stages": [STAGE]} | ({"draft": {}} if model == "mtp" else {})
    folder = train(recipe(vocabulary=size, **changes))
    network = load_network(folder, target)
    if model == "mtp":
        assert network.token_ids is None and FeatureDraft(network).vocabulary == size / target.vocab_size
        FeatureDraft(network, Subnet(vocabulary=1.0))  # does not go beyond these
    assert network.token_ids is not None and network.token_ids.tolist() == frequent
    draft, inputs = load_draft(str(folder), target), dict(processor.tokenizer("Count to ten", return_tensors="pt"))
    decoder = Decoder(target, draft, tree={"policy": "chain", "depth": 3})
    drafted, plain = (one.generate(**inputs, max_new_tokens=12).sequences for one in (decoder, Decoder(target)))
    assert torch.equal(drafted, plain)


@pytest.mark.parametrize("model", NETWORKS)
def test_every_kind_of_draft_trains_on_a_file(model: str, recipe: Callable[..., Path], pair: Pair) -> None:
    """Examples with and without images and answers; the draft then loads for its target."""
    path = recipe(
        model=model, stages=[STAGE], **({"draft": {}} if model == "mtp" else {})
    )  # its sizes are the target's
    folder, target = train(path), Target(pair.target)
    assert load_draft(str(folder), target).kind == model
    if model != "eagle3":  # its vocabulary is that of its own output layer
        frequencies = load_network(folder, target).token_frequencies
        assert frequencies is not None and len(frequencies) == target.vocab_size
        num_tokens = float(frequencies.sum())
        assert num_tokens > 4 and num_tokens == pytest.approx(round(num_tokens), abs=1e-2), "a whole number was counted"
    weights = (folder / "model.safetensors").read_bytes()
    train(path)
    assert (folder / "model.safetensors").read_bytes() == weights, "a finished training counts the same tokens"
