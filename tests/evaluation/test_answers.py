"""``autotune run`` decodes each prompt by the operating point for its task and temperature, and streams the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TextStreamer

from autotune.cli import main as cli
from autotune.documents.condition import Condition
from autotune.evaluation.answers import answer_prompts
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.trees.verification import WetapVerification
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.sample_documents import decoding_profile, write_workload
from tests.tiny_models import Pair


@pytest.fixture
def path(pair: Pair, tmp_path: Path) -> Path:
    """A lossy point for the task ``loose``, plain decoding for sampling, and a lossless tree for all other requests."""
    target, draft = (reference(str(folder)) for folder in (pair.target_folder, pair.draft_folder))
    profile = decoding_profile(target, draft, hardware=fingerprint("cpu"))
    lossy = {"when": Condition(workload="loose"), "verification": WetapVerification(threshold=1e-9), "lossless": False}
    sampled = {"when": Condition.model_validate({"temperature": {"min": 0.5}}), "draft": None, "tree": None}
    points = [profile.point.model_copy(update=changes) for changes in (lossy, sampled, {})]
    profile.model_copy(update={"points": points}).save(tmp_path / "points.json")
    return tmp_path / "points.json"


def test_answers_name_the_point_that_decoded_them(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prompt(**settings: Any) -> WorkloadPrompt:
        return WorkloadPrompt("p", Prompt(prompt="Go on.", max_new_tokens=12, **settings), ())

    prompts = [prompt(task="loose"), prompt(temperature=1.0), prompt(task="loose", temperature=1.0), prompt()]
    answers = []
    for answer in answer_prompts(path, prompts, device="cpu", prints=True):
        assert capsys.readouterr().out.rstrip() == answer["text"]
        answers.append(answer)
    assert [answer["stats"]["point"] for answer in answers] == [0, 1, 0, 2]
    assert [answer["lossless"] for answer in answers] == [False, True, False, True]
    assert [answer["perplexity"] is None for answer in answers] == [False, True, False, True]
    labels = ["workload loose", "temperature from 0.5", "workload loose", "any request"]
    for answer, label in zip(answers, labels, strict=True):
        assert f"; point {answer['stats']['point']}: {label}" in answer["summary"]
    assert ["tokens a round" in answer["summary"] for answer in answers] == [True, False, True, True]


def test_an_answer_is_printed_while_it_is_decoded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[bool] = []
    monkeypatch.setattr(
        TextStreamer, "on_finalized_text", lambda self, text, stream_end=False: printed.append(stream_end)
    )
    prompt = WorkloadPrompt("p", Prompt(prompt="Go on.", max_new_tokens=40), ())
    for prints in (False, True):
        list(answer_prompts(path, [prompt], device="cpu", prints=prints))
        assert bool(printed) == prints
    assert printed.count(False) > 5 and printed[-1]


def test_options_select_the_point(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--task`` replaces the tasks of a workload's prompts."""
    line = {"prompt": "Go on.", "split": "evaluate", "task": "strict", "max_new_tokens": 6}
    workload = str(write_workload(tmp_path, [line, {**line, "task": "loose"}]))
    for arguments, expected in (
        (["--prompt", "Go on."], [2]),
        (["--prompt", "Go on.", "--task", "loose"], [0]),
        (["--workload", workload], [2, 0]),
        (["--workload", workload, "--task", "loose"], [0, 0]),
        (["--workload", workload, "--temperature", "0.6"], [1, 0]),
    ):
        cli.main(["run", str(path), "--max-new-tokens", "6", *arguments], standalone_mode=False)
        printed = capsys.readouterr()
        points = [int(part.split(":")[0]) for part in printed.err.split("; point ")[1:]]
        assert points == expected and len(printed.out.splitlines()) >= len(expected), arguments
