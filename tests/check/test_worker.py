"""The worker: its answers through the public interface alone, and failures."""

from __future__ import annotations

import ast
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import autotune
from autotune.check import worker
from autotune.check.worker_process import WORKER, Side, WorkerProcess
from autotune.documents.decoded import tokens_key
from autotune.errors import UserError
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.sample_documents import decoding_profile
from tests.tiny_models import Inputs, Pair


@pytest.fixture
def profile(pair: Pair, tmp_path: Path) -> Path:
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft, hardware=fingerprint("cpu")).save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


SETTINGS = Prompt(prompt="prompt", max_new_tokens=20)
PROMPT = WorkloadPrompt("prompt", SETTINGS, ())


def served(profile: Path, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """The worker's answers, in this process."""
    answers = io.StringIO()
    lines = io.StringIO("".join(json.dumps(one) + "\n" for one in requests))
    worker.serve(lines, answers, {"profile": str(profile), "options": {"device": "cpu"}})
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_worker_process_decodes_and_reports_failures(
    profile: Path, prompts: dict[str, Inputs], tmp_path: Path
) -> None:
    """A real process: warmed up, with the decoder's answer and counts, and an error as one line."""
    path = tmp_path / "inputs.safetensors"
    save_file({name: value.contiguous() for name, value in prompts["image"].items()}, path)
    requests = {"prompt": path, "gone": tmp_path / "gone.safetensors"}
    with WorkerProcess(Side("head", "this code", profile), requests, device="cpu", log=tmp_path / "log") as process:
        process.prepare([PROMPT])
        found = process.decode(PROMPT)
        assert (found.arm, found.prompt, found.prompt_sha256) == ("head", "prompt", PROMPT.sha256)
        output = autotune.load(profile, device="cpu").generate(**prompts["image"], **SETTINGS.generation)
        stats = output.stats
        assert found.tokens_sha256 == tokens_key(output.sequences[0, stats.prompt_tokens :].tolist())
        assert found.accepted_lengths == stats.accepted_lengths and sum(found.accepted_lengths) > 0
        assert (found.target_forwards, found.draft_forwards) == (stats.target_forwards, stats.draft_forwards)
        assert found.verified_nodes == sum(stats.verified_nodes) and found.plain_steps == 0
        assert found.new_tokens == 20 and found.decode_ms > 0
        with pytest.raises(RuntimeError, match=r"head.*gone\.safetensors"):
            process.decode(replace(PROMPT, name="gone"))


def test_its_clock_runs_from_the_first_token_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.1, 1.5, 1.6, 1.75])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(times))
    watch = worker.Stopwatch()
    for tokens in ("the prompt", "its first token", "the next"):
        watch.put(tokens)
    watch.end()
    assert watch.decode_ms == pytest.approx(250.0)


def test_an_error_is_an_answer(profile: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (answer,) = served(tmp_path / "gone.json")
    assert answer["error"].startswith("UserError: ") and "gone.json: no such file" in answer["error"]
    assert "Traceback" in capfd.readouterr().err, "for the log"
    ready, broken = served(profile, {"task": "x"})
    assert Path(ready["ready"]) == Path(autotune.__file__).parent and broken["error"] == "KeyError: 'inputs'"
    assert broken["is_fault"] and not answer["is_fault"]


def test_it_uses_only_the_public_interface() -> None:
    """Other commits of autotune run it too."""
    names = set()
    for node in ast.walk(ast.parse(WORKER.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert all(module == "autotune" or not module.startswith("autotune") for module in modules)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "autotune":
            names.add(node.attr)
    assert names - {"__file__"} <= set(autotune.__all__)


def stub(folder: Path, body: str) -> Path:
    """A package named autotune with this content."""
    (folder / "autotune").mkdir(parents=True)
    (folder / "autotune" / "__init__.py").write_text(body)
    return folder


STUB = """
print("a library that prints")
def load(profile, device):
    {load}
"""


def process(code: Path, folder: Path, *, package: Path | None = None) -> WorkerProcess:
    """A base whose package is taken to be in a folder."""
    made = WorkerProcess(
        Side("base", "main (0123456789)", folder / "p.json", code), {}, device="cpu", log=folder / "log"
    )
    made.side = replace(made.side, code=package or code)
    return made


def test_a_process_runs_the_code_of_its_side(tmp_path: Path) -> None:
    with process(stub(tmp_path, STUB.format(load="return None")), tmp_path) as made:
        made.wait()
    assert made._process.returncode == 0
    assert "a library that prints" in (tmp_path / "log").read_text(), "in the log, not in the answers"
    with (
        process(tmp_path, tmp_path, package=tmp_path / "elsewhere") as other,
        pytest.raises(UserError, match=r"the base, main .*, imports autotune from .*, not from .*elsewhere"),
    ):
        other.wait()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("raise ValueError('no such' + chr(10) + 'profile')", "ValueError: no such profile"),
        ("import os; os._exit(3)", "a library that prints"),
    ],
)
def test_a_base_that_cannot_load_fails_in_one_line(load: str, message: str, tmp_path: Path) -> None:
    made = process(stub(tmp_path, STUB.format(load=load)), tmp_path)
    with made, pytest.raises(UserError) as caught:
        made.wait()
    assert str(caught.value) == (
        f"the base, main (0123456789), cannot decode with the profile: {message}; see its log {tmp_path / 'log'}"
    )
