"""Training of drafts: teacher batches, losses, and runs that are killed and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from autotune.drafters.checkpoint import new_network
from autotune.errors import UserError
from autotune.files import read_lines
from autotune.modeling.target import Target
from autotune.training import trainer
from autotune.training.draft_task import DraftTask
from autotune.training.losses import own_feature_mask, rows_of
from autotune.training.memory import BatchShape
from autotune.training.recipe import load_recipe
from autotune.training.teacher import Example, Teacher, TeacherBatch
from autotune.training.teacher_batches import ProcessShare, TeacherBatches
from autotune.training.trainer import train
from autotune.workloads.digits import _scan_bank
from tests.tiny_models import TARGET_LAYERS, Inputs, Pair

SIZES = {"num_heads": 4, "head_size": 8, "mlp_size": 32}
LAST = TARGET_LAYERS
ALL_LAYERS = range(LAST + 1)  # 0: what enters the first one


@pytest.fixture(scope="module")
def target(pair: Pair) -> Target:
    return Target(pair.target)


@pytest.fixture(scope="module")
def examples(target: Target, prompts: dict[str, Inputs]) -> list[Example]:
    """Of three lengths; the last five tokens of each are its answer."""
    with torch.no_grad():
        read = [target.encode(inputs).prompts[0] for inputs in prompts.values()]
    return [Example(prompt, len(prompt) - 6) for prompt in read]


# ------------------------------------------------------------------------------------------------------ teacher batches


def test_a_padded_batch_equals_its_examples_one_by_one(
    pair: Pair, target: Target, examples: list[Example], prompts: dict[str, Inputs]
) -> None:
    lesson = Teacher(target).read(examples, layers=ALL_LAYERS)
    logits = lesson.head(lesson.hidden[LAST][lesson.loss_mask])
    for row, inputs in enumerate(prompts.values()):
        with torch.no_grad():
            alone = pair.target(**inputs, output_hidden_states=True)
        length = inputs["input_ids"].shape[1]
        assert int(lesson.is_token[row].sum()) == length
        for layer, hidden in enumerate(alone.hidden_states):
            torch.testing.assert_close(lesson.hidden[layer][row, :length], hidden[0], atol=2e-4, rtol=1e-4)
        teacher_logprobs = alone.logits[0, length - 6 :]
        torch.testing.assert_close(logits[6 * row : 6 * row + 6], teacher_logprobs, atol=1e-3, rtol=1e-4)


def test_visual_tokens_are_ranked_by_the_prompt_alone(
    target: Target, examples: list[Example], prompts: dict[str, Inputs]
) -> None:
    """As at inference, where the answer is not there yet: the text of the prompt asks."""
    lesson = Teacher(target).read(examples, layers=())
    assert set(lesson.visual_scores) == {1, 2}
    for row, name in ((1, "image"), (2, "long")):
        inputs = dict(prompts[name])
        cut = examples[row].loss_start + 1
        for key in ("input_ids", "attention_mask"):
            inputs[key] = inputs[key][:, :cut]
        with torch.inference_mode():
            (prompt,) = target.encode(inputs).prompts
            target.reserve(cut)
            expected = target.prefill(prompt, rank_visual_tokens=True).visual_scores
        torch.testing.assert_close(lesson.visual_scores[row], expected, atol=1e-5, rtol=0)


def test_entropies_are_those_of_an_eager_model(pair: Pair, target: Target, prompts: dict[str, Inputs]) -> None:
    """AE of every layer, over the tokens that were requests."""
    with torch.no_grad():
        (prompt,) = target.encode(prompts["image"]).prompts
    lesson = Teacher(target).read([Example(prompt, len(prompt) - 4)], layers=(), rule="entropy", seed=3)
    eager = AutoModelForImageTextToText.from_pretrained(pair.target_folder, attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = eager(**prompts["image"], output_attentions=True).attentions
    rng = torch.Generator().manual_seed(3)
    torch.randint(1, (), generator=rng)
    requests = torch.randint(len(prompt), (64,), generator=rng)
    assert lesson.entropies is not None
    for found, weights in zip(lesson.entropies, attentions, strict=True):
        expected = -(weights[0] * weights[0].clamp_min(1e-30).log()).sum(-1)[:, requests].mean()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("entropies", "by_entropy", "by_both"),
    [([3.0, 1.0, 1.1, 2.0, 0.1], 2, 3), ([0.5, 2.0, 1.9, 1.2, 0.0], 1, 4), ([2.0, 2.0, 1.0, 3.0, 0.0], 3, 2)],
)
def test_the_distillation_layer_by_hand(entropies: list[float], by_entropy: int, by_both: int) -> None:
    """Layers count from 1; the last one is another loss's. AE + |change| of the first case: -, 1 + 2, 1.1 + 0.1, 2 + 0.9."""
    lesson = TeacherBatch(*([torch.zeros(1)] * 4), {}, {}, torch.tensor(entropies), lambda states: states)
    assert lesson.distilled_layer("entropy") == by_entropy
    assert lesson.distilled_layer("entropy-and-change") == by_both


def test_rows_leave_out_the_least_attended_visual_tokens_and_nothing_else(
    target: Target, examples: list[Example]
) -> None:
    lesson = Teacher(target).read(examples, layers=(2,))
    network = new_network("star", SIZES, target, source="test")
    rows = rows_of(network, lesson, visual_keep=0.25, injection_layer=2)
    for row, example in enumerate(examples):
        length = len(example.prompt)
        kept = rows.positions[row][: length - (12 if row else 0)]
        text = set(range(length)) - set(lesson.is_visual[row].nonzero()[:, 0].tolist())
        visual = sorted(set(kept.tolist()) - text)
        assert text <= set(kept.tolist()) and kept.tolist() == sorted(kept.tolist())
        if row:
            best = lesson.is_visual[row].nonzero()[:, 0][lesson.visual_scores[row].topk(4).indices]
            assert visual == sorted(best.tolist())
        for column, place in enumerate(kept.tolist()):  # the embedding of a token beside the feature of the one before
            assert torch.equal(rows.embeddings[row, column], lesson.embeddings[row, place])
            if place > 0:
                before = network.target_features({2: lesson.hidden[2][row, place - 1]})
                torch.testing.assert_close(rows.features[row, column], before)
    assert int(rows.loss_mask.sum()) == int(lesson.loss_mask.sum())


def test_own_stretches_begin_with_a_true_feature(target: Target, examples: list[Example]) -> None:
    lesson = Teacher(target).read(examples, layers=())
    network = new_network("dream", SIZES, target, source="test")
    rows = rows_of(network, lesson, visual_keep=1.0, injection_layer=4)
    found = [own_feature_mask(rows, torch.Generator().manual_seed(seed)) for seed in range(40)]
    for is_own in found:
        assert not is_own[~rows.loss_mask].any(), "prompts are read with the target's features"
        assert int(is_own.sum(1).max()) <= 5
        first = rows.loss_mask.int().argmax(1)
        assert not is_own[range(3), first].any(), "the root of the first round"
    assert torch.stack(found).any(0).sum() == 15, "every other answer token is drafted at some time"


# ---------------------------------------------------------------------------------------------- cached teacher batches


@dataclass
class CountedExamples:
    """Three batches that count how often each was requested."""

    examples: list[Example]
    num_batches: int | None = 3
    requests: Counter[int] = field(default_factory=Counter)

    @property
    def shapes(self) -> list[BatchShape]:
        return [BatchShape(2, max(len(example.prompt) for example in self.examples), 12)] * 3

    def __getitem__(self, number: int) -> list[Example]:
        self.requests[number] += 1
        return [self.examples[number], self.examples[(number + 1) % 3]]


@pytest.fixture
def batches(examples: list[Example]) -> CountedExamples:
    return CountedExamples(examples)


def same(first: TeacherBatch, second: TeacherBatch) -> bool:
    """Whether two batches are equal bit for bit."""
    numbers = [
        [
            one.embeddings,
            one.is_visual,
            one.lengths,
            one.loss_start,
            *one.hidden.values(),
            *one.visual_scores.values(),
        ]
        for one in (first, second)
    ]
    keys = [(list(one.hidden), list(one.visual_scores), one.entropies is None) for one in (first, second)]
    return keys[0] == keys[1] and all(torch.equal(a, b) for a, b in zip(*numbers, strict=True))


def test_a_repeated_batch_is_read_from_the_cache(target: Target, batches: CountedExamples, tmp_path: Path) -> None:
    """Also in a new run."""
    lessons = [TeacherBatches(batches, Teacher(target), layers=(2,), rule="entropy", cache=tmp_path) for _ in range(2)]
    first = [lessons[0][step] for step in range(3)]
    assert batches.requests == {0: 1, 1: 1, 2: 1}
    for step in range(3, 9):
        assert same(lessons[step % 2][step], first[lessons[0].batch_of(step)])
    assert sum(batches.requests.values()) == 3, "the target read everything once"
    assert not same(first[0], first[1])


def test_a_cached_batch_equals_the_teachers_outputs(target: Target, batches: CountedExamples, tmp_path: Path) -> None:
    """Up to half precision."""
    teacher = Teacher(target)
    cached = TeacherBatches(batches, teacher, layers=ALL_LAYERS, cache=tmp_path)[0]
    fresh = teacher.read(batches[0], layers=ALL_LAYERS)
    assert cached.hidden.keys() == fresh.hidden.keys() == set(ALL_LAYERS)
    for layer in ALL_LAYERS:
        torch.testing.assert_close(cached.hidden[layer], fresh.hidden[layer], atol=1e-3, rtol=1e-3)
    for name in ("is_visual", "lengths", "loss_start"):
        assert torch.equal(getattr(cached, name), getattr(fresh, name))


def test_an_epoch_visits_every_batch_once(target: Target, batches: CountedExamples) -> None:
    lessons = TeacherBatches(batches, Teacher(target), layers=(), seed=5)
    epochs = [[lessons.batch_of(3 * epoch + step) for step in range(3)] for epoch in range(12)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 2, "in another order each time"
    endless = TeacherBatches(CountedExamples(batches.examples, None), Teacher(target), layers=())
    assert [endless.batch_of(step) for step in range(5)] == [0, 1, 2, 3, 4]


def test_drafts_that_need_other_layers_share_the_cache(
    target: Target, batches: CountedExamples, tmp_path: Path
) -> None:
    first = TeacherBatches(batches, Teacher(target), layers=(1,), rule="entropy", cache=tmp_path)
    second = TeacherBatches(batches, Teacher(target), layers=(2, 3), cache=tmp_path)
    before = first[0]
    found = second[0]
    assert found.hidden.keys() >= {1, 2, 3, LAST} and batches.requests == {0: 2}
    after = first[0]
    assert batches.requests == {0: 2}, "the first still finds its layers, including the one that entropies choose"
    assert after.distilled_layer("entropy") == before.distilled_layer("entropy")
    assert all(torch.equal(after.hidden[layer], states) for layer, states in before.hidden.items())
    assert same(second[0], found)


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "other"])
def test_a_damaged_cache_entry_is_made_again(
    target: Target, batches: CountedExamples, tmp_path: Path, damage: str
) -> None:
    """Damage as a full disk or a crash leaves it."""
    lessons = TeacherBatches(batches, Teacher(target), layers=(2,), cache=tmp_path)
    whole = lessons[0]
    (path,) = tmp_path.glob("*.safetensors")
    content = path.read_bytes()
    path.unlink()  # truncating it in place would damage batches that are memory-mapped
    if damage == "other":
        save_file({"x": torch.zeros(1)}, path)
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "noise": b"\xff" * 100}[damage])
    assert same(lessons[0], whole) and batches.requests == {0: 2}
    assert same(lessons[0], whole) and batches.requests == {0: 2}


# ----------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def recipe_path(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven steps of a star draft for the bundled target, on examples of the bundled workload."""
    # One variant of each scan instead of 64, which take ten seconds to draw.
    monkeypatch.setattr("autotune.workloads.digits._scan_bank", lambda split, num_variants: _scan_bank(split, 1))
    return write_recipe(tmp_path / "recipe.yaml", str(Path("drafts/digits/target").resolve()))


def write_recipe(path: Path, teacher: str | None, *, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    stage = {"objective": "drafting", "batch_size": 2, "learning_rate": 1e-3, "warmup_steps": 2}
    recipe = {
        "schema": "autotune.recipe/1",
        "name": "tests/star",
        "description": "small",
        "model": "star",
        "teacher": teacher,
        "draft": SIZES,
        "tasks": {"read": 1.0},
        "seed": 1,
        "stages": [
            {**stage, "steps": 3, "distillation": "entropy-and-change"},
            {**stage, "steps": 4, "subnets": "random"},
        ],
        **changes,
    }
    path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if key not in drop}))
    return path


class _Killed(Exception):
    pass


@pytest.mark.parametrize(
    "killed_after", [3, pytest.param(2, marks=pytest.mark.nightly), pytest.param(5, marks=pytest.mark.nightly)]
)
def test_a_killed_run_ends_with_the_same_weights(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    """Equal bit for bit, in whichever stage it was killed; checkpoints are written every second step."""
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 2)
    whole = train(recipe_path, output=tmp_path / "whole")
    train_killed(recipe_path, tmp_path / "killed", killed_after)
    assert whole == tmp_path / "whole"
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")


def test_a_run_of_a_file_killed_at_any_step_ends_with_the_same_weights(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each killed run starts in a new folder, without cached answers or teacher batches."""
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 2)
    write_examples(tmp_path / "examples.jsonl")
    path = write_recipe(
        tmp_path / "recipe.yaml", str(pair.target_folder), data={"file": "examples.jsonl"}, drop=("tasks",)
    )

    def begin_in(name: str) -> Path:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name / "out"

    messages: list[str] = []
    whole = train(path, output=begin_in("whole"), notify=messages.append)
    assert "memory on cpu: about" in messages[0] and "teacher batches on disk" in messages[0]
    assert str(whole) in messages[1]
    assert (whole / "training.png").read_bytes()[1:4] == b"PNG"
    for killed_after in range(1, 7):
        found = begin_in(f"killed{killed_after}")
        train_killed(path, found, killed_after)
        assert_same_weights(whole, found)
    lines = read_lines(found / "training.jsonl")
    assert [(line["stage"], line["step"]) for line in lines] == [(0, 3), (1, 4)], "the end of every stage is logged"
    assert all("held_out_agreement" in line for line in lines)


def train_killed(recipe_path: Path, output: Path, killed_after: int) -> None:
    """Train until killed after some steps, then to the end."""
    steps = 0

    def progress(stage: str, *_: Any) -> None:
        nonlocal steps
        steps += "drafting" in stage
        if steps > killed_after:
            raise _Killed

    with pytest.raises(_Killed):
        train(recipe_path, output=output, progress=progress)
    seen: list[int] = []
    train(
        recipe_path, output=output, progress=lambda stage, step, *_: seen.append(step) if "drafting" in stage else None
    )
    assert len(seen) < 7 or killed_after < 2, "the run restarted from the beginning"


def assert_same_weights(first: Path, second: Path) -> None:
    expected, found = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def write_examples(path: Path) -> None:
    """Seven examples, with and without images and answers."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(path.parent / "image.png")
    lines = []
    for number in range(7):
        line: dict[str, Any] = {"prompt": "Count to " + "ten, then to " * number + "two.", "max_new_tokens": 9}
        if number % 2:
            line["images"] = ["image.png"]
        if number % 3 == 0:
            line["answer"] = " Row 1 reads 3, 1, 4." * (1 + number)
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))


def test_training_lowers_the_loss_and_finds_important_heads(recipe_path: Path, tmp_path: Path) -> None:
    losses: list[float] = []
    stage = {"objective": "drafting", "batch_size": 2, "learning_rate": 3e-3, "warmup_steps": 2, "steps": 16}
    path = write_recipe(tmp_path / "longer.yaml", load_recipe(recipe_path).teacher or "", stages=[stage])
    train(path, output=tmp_path / "out", progress=lambda stage, step, of, figures: losses.append(figures["loss"]))
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert (tensors["head_importance"] > 0).all()


@pytest.mark.nightly
def test_two_processes_share_a_batch(pair: Pair, tmp_path: Path) -> None:
    """Each process generates half of the answers and reads half of each batch; gradients are averaged, and one process writes.

    On a CPU torchrun starts them, because ``accelerate launch`` starts only one process there.
    """
    write_examples(tmp_path / "examples.jsonl")
    path = write_recipe(
        tmp_path / "recipe.yaml", str(pair.target_folder), data={"file": "examples.jsonl"}, drop=("tasks",)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "autotune", "train"]
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [*command, str(path), "-o", "two"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "two" / "model.safetensors").exists()
    assert done.stderr.count("memory on cpu") == 1, "only one process prints"
    cached = [folder for folder in (tmp_path / ".autotune" / "teacher-batches").iterdir()]
    assert len(cached) == 2 and all(len([*folder.iterdir()]) == 2 for folder in cached), "each read every batch"
    assert len([*(tmp_path / ".autotune" / "answers").iterdir()]) == 4


def test_processes_read_every_row_once(examples: list[Example]) -> None:
    shares = [ProcessShare(CountedExamples(examples), process, 2) for process in range(2)]
    assert [share[0] for share in shares] == [[examples[0]], [examples[1]]]
    assert [share.shapes[0].num_rows for share in shares] == [1, 1] and shares[0].num_batches == 3


def test_more_processes_than_examples_of_a_batch(recipe_path: Path) -> None:
    accelerator = SimpleNamespace(process_index=0, num_processes=4)
    with pytest.raises(UserError, match=r"got batch_size 2 for 4 processes; raise batch_size, or start fewer"):
        DraftTask(load_recipe(recipe_path), recipe_path, accelerator)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_recipe_of_a_draft_without_a_teacher(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", None)
    with pytest.raises(UserError, match=r"a draft needs a teacher; add 'teacher: ../target'"):
        load_recipe(path)


def test_a_draft_is_trained_by_drafting(tmp_path: Path) -> None:
    stage = {"objective": "answers", "steps": 1, "batch_size": 1, "learning_rate": 1e-3}
    path = write_recipe(tmp_path / "recipe.yaml", "x", stages=[stage])
    with pytest.raises(UserError, match=r"objective drafting is for dream, star, specvlm.*got answers for star"):
        load_recipe(path)


def test_sizes_that_are_misspelt(recipe_path: Path, tmp_path: Path) -> None:
    teacher = load_recipe(recipe_path).teacher or ""
    path = write_recipe(tmp_path / "recipe.yaml", teacher, draft={**SIZES, "num_head": 4})
    with pytest.raises(UserError, match="unknown key 'num_head'; did you mean 'num_heads'"):
        train(path, output=tmp_path)
