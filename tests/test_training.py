"""Training drafts: lessons of the teacher, losses, and a run that is killed and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from autotune.drafters.checkpoint import new_network
from autotune.errors import UserError
from autotune.runtime.target import Target
from autotune.training import trainer
from autotune.training.drafting import distillation_layer, own_stretches, rows_of
from autotune.training.recipe import load_recipe
from autotune.training.teacher import Example, Lesson, Teacher
from autotune.training.trainer import train
from tests.conftest import Inputs, Pair

SIZES = {"num_heads": 4, "head_size": 8, "mlp_size": 32}


@pytest.fixture(scope="module")
def target(pair: Pair) -> Target:
    return Target(pair.target)


@pytest.fixture(scope="module")
def examples(target: Target, prompts: dict[str, Inputs]) -> list[Example]:
    """Of three lengths; the last five tokens of each are its answer."""
    with torch.no_grad():
        read = [target.encode(inputs).prompts[0] for inputs in prompts.values()]
    return [Example(prompt, len(prompt) - 6) for prompt in read]


# -------------------------------------------------------------------------------------------------------------- lessons


def test_a_padded_lesson_is_what_each_example_is_alone(
    pair: Pair, target: Target, examples: list[Example], prompts: dict[str, Inputs]
) -> None:
    lesson = Teacher(target).lesson(examples, seed=0)
    for row, inputs in enumerate(prompts.values()):
        with torch.no_grad():
            alone = pair.target(**inputs, output_hidden_states=True)
        length = inputs["input_ids"].shape[1]
        assert int(lesson.is_token[row].sum()) == length
        for layer, hidden in enumerate(alone.hidden_states):
            torch.testing.assert_close(lesson.hidden[layer][row, :length], hidden[0], atol=2e-4, rtol=1e-4)
        taught = alone.logits[0, length - 6 :]
        torch.testing.assert_close(lesson.logits[6 * row : 6 * row + 6], taught, atol=1e-3, rtol=1e-4)


def test_visual_tokens_are_ranked_by_the_prompt_alone(
    target: Target, examples: list[Example], prompts: dict[str, Inputs]
) -> None:
    """As at inference, where the answer is not there yet: the text of the prompt asks."""
    lesson = Teacher(target).lesson(examples, seed=0)
    assert set(lesson.visual_scores) == {1, 2}
    for row, name in ((1, "image"), (2, "long")):
        inputs = dict(prompts[name])
        cut = examples[row].first_taught + 1
        for key in ("input_ids", "attention_mask"):
            inputs[key] = inputs[key][:, :cut]
        with torch.inference_mode():
            (prompt,) = target.encode(inputs).prompts
            target.reserve(cut)
            expected = target.prefill(prompt, rank_visual_tokens=True).visual_scores
        torch.testing.assert_close(lesson.visual_scores[row], expected, atol=1e-5, rtol=0)


def test_entropies_are_those_of_an_eager_model(pair: Pair, target: Target, prompts: dict[str, Inputs]) -> None:
    """AE of every layer, over the tokens that were asked."""
    with torch.no_grad():
        (prompt,) = target.encode(prompts["image"]).prompts
    lesson = Teacher(target).lesson([Example(prompt, len(prompt) - 4)], seed=3, with_entropies=True)
    eager = AutoModelForImageTextToText.from_pretrained(pair.target_folder, attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = eager(**prompts["image"], output_attentions=True).attentions
    rng = torch.Generator().manual_seed(3)
    torch.randint(1, (), generator=rng)
    asked = torch.randint(len(prompt), (64,), generator=rng)
    for found, weights in zip(lesson.entropies, attentions, strict=True):
        expected = -(weights[0] * weights[0].clamp_min(1e-30).log()).sum(-1)[:, asked].mean()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("entropies", "by_entropy", "by_both"),
    [([3.0, 1.0, 1.1, 2.0, 0.1], 2, 3), ([0.5, 2.0, 1.9, 1.2, 0.0], 1, 4), ([2.0, 2.0, 1.0, 3.0, 0.0], 3, 2)],
)
def test_the_distillation_layer_by_hand(entropies: list[float], by_entropy: int, by_both: int) -> None:
    """Layers count from 1; the last one is another loss's. AE + |change| of the first case: -, 1 + 2, 1.1 + 0.1, 2 + 0.9."""
    lesson = Lesson(*([torch.zeros(1)] * 4), {}, torch.zeros(1), {}, torch.tensor(entropies), lambda states: states)
    assert distillation_layer(lesson, "entropy") == by_entropy
    assert distillation_layer(lesson, "entropy-and-change") == by_both


def test_rows_leave_out_the_least_attended_visual_tokens_and_nothing_else(
    target: Target, examples: list[Example]
) -> None:
    lesson = Teacher(target).lesson(examples, seed=0)
    network = new_network("star", SIZES, target, source="test")
    rows = rows_of(network, lesson, visual_keep=0.25, injection_layer=2)
    for row, example in enumerate(examples):
        length = len(example.prompt)
        kept = rows.places[row][: length - (12 if row else 0)]
        text = set(range(length)) - set(lesson.is_visual[row].nonzero()[:, 0].tolist())
        visual = sorted(set(kept.tolist()) - text)
        assert text <= set(kept.tolist()) and kept.tolist() == sorted(kept.tolist())
        if row:
            best = lesson.is_visual[row].nonzero()[:, 0][lesson.visual_scores[row].topk(4).indices]
            assert visual == sorted(best.tolist())
        for column, place in enumerate(kept.tolist()):  # the embedding of a token beside the feature of the one before
            assert torch.equal(rows.embeddings[row, column], lesson.embeddings[row, place])
            if place > 0:
                before = network.target_features(lesson.hidden[2][row, place - 1], 2)
                torch.testing.assert_close(rows.features[row, column], before)
    assert int(rows.is_taught.sum()) == int(lesson.is_taught.sum())


def test_own_stretches_begin_with_a_true_feature(target: Target, examples: list[Example]) -> None:
    lesson = Teacher(target).lesson(examples, seed=0)
    network = new_network("dream", SIZES, target, source="test")
    rows = rows_of(network, lesson, visual_keep=1.0, injection_layer=4)
    found = [own_stretches(rows, torch.Generator().manual_seed(seed)) for seed in range(40)]
    for is_own in found:
        assert not is_own[~rows.is_taught].any(), "prompts are read with the target's features"
        assert int(is_own.sum(1).max()) <= 5
        first = rows.is_taught.int().argmax(1)
        assert not is_own[range(3), first].any(), "the root of the first round"
    assert torch.stack(found).any(0).sum() == 15, "every other answer token is drafted at some time"


# ----------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def recipe_path(pair: Pair, tmp_path: Path) -> Path:
    """Seven steps of a star draft of the bundled workload's examples, for a target that reads its images."""
    return write_recipe(tmp_path / "recipe.yaml", str(Path("drafts/digits/target").resolve()))


def write_recipe(path: Path, teacher: str | None, **changes: Any) -> Path:
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
    path.write_text(yaml.safe_dump(recipe))
    return path


class _Killed(Exception):
    pass


@pytest.mark.parametrize("killed_after", [2, 3, 5])
def test_a_killed_run_ends_with_the_same_weights(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    """Bit for bit, whichever stage it was in; the checkpoint of every second step is what it goes on from."""
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 2)
    whole = train(recipe_path, output=tmp_path / "whole")
    steps = 0

    def progress(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > killed_after:
            raise _Killed

    with pytest.raises(_Killed):
        train(recipe_path, output=tmp_path / "killed", progress=progress)
    seen: list[int] = []
    train(recipe_path, output=tmp_path / "killed", progress=lambda stage, step, of, figures: seen.append(step))
    assert len(seen) < 7, "it began anew"
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert expected.keys() == found.keys() and whole == tmp_path / "whole"
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_training_lowers_the_loss_and_finds_important_heads(recipe_path: Path, tmp_path: Path) -> None:
    losses: list[float] = []
    stage = {"objective": "drafting", "batch_size": 2, "learning_rate": 3e-3, "warmup_steps": 2, "steps": 16}
    path = write_recipe(tmp_path / "longer.yaml", load_recipe(recipe_path).teacher or "", stages=[stage])
    train(path, output=tmp_path / "out", progress=lambda stage, step, of, figures: losses.append(figures["loss"]))
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert (tensors["head_importance"] > 0).all()


def test_two_processes_share_a_batch(recipe_path: Path, tmp_path: Path) -> None:
    """accelerate starts them; both read their half, and the gradients' mean moves both alike. One of them writes."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--module"]
    command += ["autotune", "train", str(recipe_path), "-o", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "two" / "model.safetensors").exists()


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_recipe_of_a_draft_without_a_teacher(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "recipe.yaml", None)
    with pytest.raises(UserError, match=r"a draft is distilled from a target; add 'teacher: ../target'"):
        load_recipe(path)


def test_a_draft_is_trained_by_drafting(tmp_path: Path) -> None:
    stage = {"objective": "answers", "steps": 1, "batch_size": 1, "learning_rate": 1e-3}
    path = write_recipe(tmp_path / "recipe.yaml", "x", stages=[stage])
    with pytest.raises(UserError, match=r"the objective of star, dream is drafting.*got answers for star"):
        load_recipe(path)


def test_sizes_that_are_misspelt(recipe_path: Path, tmp_path: Path) -> None:
    teacher = load_recipe(recipe_path).teacher or ""
    path = write_recipe(tmp_path / "recipe.yaml", teacher, draft={**SIZES, "num_head": 4})
    with pytest.raises(UserError, match="unknown key 'num_head'; did you mean 'num_heads'"):
        train(path, output=tmp_path)
