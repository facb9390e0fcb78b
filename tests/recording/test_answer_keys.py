"""A file of the target that has changed gives other keys to what it changes, and to nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.recording.recorder import Recorder
from autotune.workloads.workload import Workload

ALL = frozenset(range(5))
IMAGES = frozenset({1, 2, 3})  # prompts of the workload with an image
SAMPLED = frozenset({3})


def _template(processor: Any, _: Any) -> None:
    processor.chat_template = "Answer well. " + (processor.chat_template or "")


def _comment(processor: Any, _: Any) -> None:
    processor.chat_template = "{# repaired #}" + processor.chat_template


def _image_mean(processor: Any, _: Any) -> None:
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]


def _normalizer(processor: Any, _: Any) -> None:
    from tokenizers.normalizers import Replace

    processor.tokenizer.backend_tokenizer.normalizer = Replace("Count", "Recount")


def _setting(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda _, config: setattr(config, name, value)


CHANGES: dict[str, tuple[Callable[[Any, Any], None], frozenset[int]]] = {
    "nothing": (lambda processor, config: None, frozenset()),
    "template": (_template, ALL),
    "comment in the template": (_comment, frozenset()),
    "processor": (_image_mean, IMAGES),
    "tokenizer": (_normalizer, frozenset({0})),
    "repetition penalty": (_setting("repetition_penalty", 1.5), ALL),
    "end of an answer": (_setting("eos_token_id", [2, 3]), ALL),
    "sampling alone": (_setting("min_p", 0.2), SAMPLED),
    "temperature that prompts replace": (_setting("temperature", 0.3), frozenset()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_recorded_anew(
    change: str, recorder: Recorder, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is of the model's files, which a later command reads; the answers are those of a new folder."""
    target = recorder.target
    arguments = target, recorder.target_reference
    processor = copy.deepcopy(recorder.processor)
    processor.chat_template = processor.chat_template or "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    Recorder(*arguments, processor, tmp_path / "old").answers(workload)
    config = copy.deepcopy(target.model.generation_config)
    monkeypatch.setattr(target.model, "generation_config", config)
    make, expected = CHANGES[change]
    make(processor, config)
    later, new = (Recorder(*arguments, processor, tmp_path / name) for name in ("old", "new"))
    anew: list[str] = []
    record = later._answers.record
    monkeypatch.setattr(later._answers, "record", lambda asked: anew.extend(p.name for p in asked) or record(asked))  # type: ignore[func-returns-value]
    found = later.answers(workload)
    assert anew == [workload.prompts[number].name for number in sorted(expected)]
    assert found == new.answers(workload)


def test_weights_and_prompts(recorder: Recorder, workload: Workload) -> None:
    first, other = workload.prompts[0], workload.prompts[4]
    reference = recorder.target_reference.model_copy(update={"sha256": "of other weights"})
    heavier = Recorder(recorder.target, reference, recorder.processor, recorder.folder, keys=recorder.keys)
    keys = {one._answer_key(prompt) for one in (recorder, heavier) for prompt in (first, other)}
    assert len(keys) == 4
    renamed = replace(first, settings=first.settings.model_copy(update={"task": "another"}))
    assert recorder.keys.of(renamed) == recorder.keys.of(first)
    assert recorder._answer_key(first.cut(5)) not in keys
