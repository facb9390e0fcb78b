"""Questions that the target writes itself: written once, resumed after a kill, trained on, and never those that
judge.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.modeling.target import Target
from autotune.recording.answers import AnswerRecorder
from autotune.training import examples
from autotune.training.examples import judged_questions, split_file, user_turn, write_questions
from autotune.training.recipe import Magpie
from autotune.training.trainer import train
from tests.obvious import refused
from tests.sample_documents import write_image, write_workload
from tests.training.conftest import STAGE

SETTINGS = Magpie(num_prompts=12, question_tokens=24, answer_tokens=5)


@pytest.fixture
def answers(target: Target, processor: Any, monkeypatch: pytest.MonkeyPatch) -> AnswerRecorder:
    """A random model hardly ever ends a turn, so that the turn ends with a token that it writes often."""
    monkeypatch.setattr(examples, "ROWS", 8)
    often = processor.tokenizer(" r", add_special_tokens=False)["input_ids"][-1]
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [often, *range(40, 60)])
    return AnswerRecorder(target, processor)


def test_the_user_turn_is_the_template_up_to_the_message(processor: Any) -> None:
    assert user_turn(processor) == ("USER: ", " ASSISTANT:")
    with refused("magpie has the target write questions by its chat template; it has none; remove magpie from data"):
        user_turn(object())


def test_questions_are_written_once_and_resumed(
    answers: AnswerRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch is on disk before the next; a second call continues with other seeds, and ends with the same file."""
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    reports: list[tuple[int, int]] = []
    write_questions(whole, SETTINGS, answers, lambda done, of: reports.append((done, of)))
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert len(lines) == len({line["prompt"] for line in lines}) == 12 and all(line["prompt"] for line in lines)
    assert {line["max_new_tokens"] for line in lines} == {5} and len(reports) > 1 and reports[-1] == (12, 12)

    def kill(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_questions(killed, SETTINGS, answers, kill)
    assert 0 < len(killed.read_text().splitlines()) < 12
    write_questions(killed, SETTINGS, answers)
    assert killed.read_text() == whole.read_text()
    monkeypatch.setattr(answers, "write_together", lambda *_, **__: pytest.fail("written twice"))
    write_questions(whole, SETTINGS, answers)


def test_a_target_that_repeats_itself(answers: AnswerRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "write_together", lambda turns, **_: [[7, 8, 1]] * len(turns))
    monkeypatch.setattr(answers.target.model.generation_config, "eos_token_id", 1)
    with refused("magpie asks for 12 questions, and the target writes no new ones after 1; raise temperature"):
        write_questions(tmp_path / "questions.jsonl", SETTINGS, answers)


def test_a_draft_is_trained_on_the_targets_own_questions(
    recipe: Callable[..., Path], answers: AnswerRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.training.draft_task.load_model", lambda *_, **__: answers.target.model)
    data = {"file": "own.jsonl", "magpie": SETTINGS.model_dump(), "temperatures": [0.0, 1.0]}
    folder = train(recipe(data=data, stages=[{**STAGE, "steps": 1}]))
    assert (folder / "model.safetensors").exists() and len((tmp_path / "own.jsonl").read_text().splitlines()) == 12


def test_judged_prompts_are_not_trained_on(tmp_path: Path) -> None:
    """By text and images, whatever the settings, of any format and of both splits."""
    for seed in range(2):
        write_image(tmp_path / f"{seed}.png", seed)
    lines: list[dict[str, Any]] = [
        {"prompt": f"Question {n}", "answer": "x", "max_new_tokens": n + 1} for n in range(6)
    ]
    lines += [{"prompt": "Look.", "images": [f"{n}.png"], "answer": "x"} for n in range(2)]
    path = write_workload(tmp_path, lines, name="examples.jsonl")
    write_workload(tmp_path, [{"question": f" Question {n}", "answer": "x"} for n in (1, 3)], name="gsm8k.jsonl")
    own = [{"prompt": "Look.", "images": ["1.png"]}, {"turns": ["Question 0", "Question 4"]}]
    write_workload(tmp_path, own, name="own.jsonl")
    judged = judged_questions(tmp_path, ["gsm8k.jsonl", "own.jsonl", "digits"])
    training, held_out = split_file(path, batch_size=1, judged=judged)
    assert [number for number, _ in (*training, *held_out)] == [3, 6, 7]
    with refused("no such file"):
        judged_questions(tmp_path, ["nowhere.jsonl"])
