"""``autotune run`` decodes each prompt with the profile, and streams the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TextStreamer

from autotune.cli import main as cli
from autotune.documents.decoding_profile import DecodingProfile
from autotune.evaluation.answers import answer_prompts
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.trees.verification import WetapVerification
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.sample_documents import decoding_profile, write_workload
from tests.tiny_models import Pair


@pytest.fixture
def path(pair: Pair, tmp_path: Path) -> Path:
    target, draft = (reference(str(folder)) for folder in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft, hardware=fingerprint("cpu")).save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.mark.parametrize(
    ("changes", "has_rounds", "is_lossy"),
    [
        ({}, True, False),
        ({"draft": None, "tree": None}, False, False),
        ({"verification": WetapVerification(threshold=1e-9)}, True, True),
    ],
)
def test_an_answer_says_how_it_was_decoded(
    path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], has_rounds: bool, is_lossy: bool
) -> None:
    profile = DecodingProfile.load(path)
    profile.model_copy(update={"point": profile.point.model_copy(update=changes)}).save(path)
    prompts = [WorkloadPrompt("p", Prompt(prompt="Go on.", max_new_tokens=12), ())]
    (answer,) = answer_prompts(path, prompts, device="cpu", prints=True)
    assert capsys.readouterr().out.strip() == answer["text"]
    assert answer["lossless"] != is_lossy and (answer["perplexity"] is not None) == is_lossy
    assert ("tokens a round" in answer["summary"]) == has_rounds and ("LOSSY" in answer["summary"]) == is_lossy


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


def test_options_set_the_settings_of_a_workload(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"prompt": "Go on.", "split": "evaluate", "max_new_tokens": 6}
    workload = str(write_workload(tmp_path, [line, line]))
    for arguments, num_answers in ((["--prompt", "Go on."], 1), (["--workload", workload, "--temperature", "0.6"], 2)):
        cli.main(["run", str(path), "--max-new-tokens", "5", *arguments], standalone_mode=False)
        printed = capsys.readouterr()
        assert printed.err.count("5 tokens in") == num_answers and printed.out.strip(), arguments
