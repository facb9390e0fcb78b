"""The makers of the pair ``digits``: the frozen prompts are theirs, and a few steps of training run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from autotune.modeling.loading import load_model, load_processor  # noqa: E402
from autotune.training.examples import split_file  # noqa: E402
from autotune.workloads.prompt import AnsweredPrompt, load_prompt  # noqa: E402
from autotune.workloads.row_files import read_jsonl  # noqa: E402
from autotune.workloads.workload import bundled_file  # noqa: E402
from drafts.digits.make import digits, models  # noqa: E402
from drafts.digits.make.digits import TASKS, _scan_bank, make_example  # noqa: E402
from drafts.digits.make.examples import write_examples  # noqa: E402


@pytest.fixture(autouse=True)
def plain_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant of each scan in place of 64, which take ten seconds to make."""
    monkeypatch.setattr(digits, "_scan_bank", lambda split, num_variants: _scan_bank(split, 1))


def test_the_frozen_prompts_are_made_again() -> None:
    path = bundled_file("digits")
    lines = read_jsonl(path, AnsweredPrompt)
    assert len(lines) == 128
    for number, line in lines:
        index = (number - 1) % 64 // len(TASKS) + (100_000 if line.split == "evaluate" else 0)
        example = make_example("held-out", line.task, index)
        assert (line.prompt, line.answer) == (example.prompt, example.answer)
        pixels = load_prompt(path, number, line).pixels
        np.testing.assert_equal(
            [np.asarray(image) for image in pixels], [] if example.image is None else [example.image]
        )


def test_a_few_steps_make_a_target_and_a_draft(tmp_path: Path) -> None:
    """Every objective runs, and the models can be loaded."""

    def short(model: models.Model, num_layers: int, layers: tuple[int, ...] = ()) -> models.Model:
        phases = tuple(
            replace(phase, stage=phase.stage.model_copy(update={"steps": 2, "batch_size": 2})) for phase in model.phases
        )
        return replace(model, phases=phases, num_layers=num_layers, teacher_layers=layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "train_tokenizer", lambda size: load_processor("digits/target").tokenizer)
        models.make(short(models.TARGET, 2), tmp_path / "target")
    models.make(short(models.INDEPENDENT, 1, (1,)), tmp_path / "draft", teacher=tmp_path / "target")
    target, draft = (load_model(str(tmp_path / name)) for name in ("target", "draft"))
    weights = [model.model.language_model.layers[-1].mlp.up_proj.weight for model in (target, draft)]
    torch.testing.assert_close(*weights, atol=0.02, rtol=0)
    assert len((tmp_path / "draft" / "training.jsonl").read_text().splitlines()) == 2


def test_examples_are_a_file_of_answered_prompts(tmp_path: Path) -> None:
    training, held_out = split_file(write_examples(tmp_path, 12, 4), batch_size=4)
    assert (len(training), len(held_out)) == (12, 4)
    for number, line in (*training, *held_out):
        assert line.answer is not None and line.answer.startswith(" ")
        assert len(load_prompt(tmp_path / "examples.jsonl", number, line).pixels) == (line.task != "continue")
