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
from autotune.check.worker_process import WORKER, Side, WorkerProcess, WorkerRequest
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import UserError
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from tests.sample_documents import decoding_profile
from tests.tiny_models import Inputs, Pair


@pytest.fixture
def profile(pair: Pair, tmp_path: Path) -> Path:
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft, hardware=fingerprint("cpu")).save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def request(inputs: Inputs, folder: Path) -> WorkerRequest:
    path = folder / "inputs.safetensors"
    save_file({name: value.contiguous() for name, value in inputs.items()}, path)
    return WorkerRequest("prompt", "0", path, {"max_new_tokens": 20, "temperature": 0.0}, "prompt", 0)


def answer(fields: dict[str, Any]) -> Decoded:
    return Decoded(arm="head", prompt="prompt", prompt_sha256="0", **fields)


def served(profile: Path, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """The worker's answers, in this process."""
    answers = io.StringIO()
    lines = io.StringIO("".join(json.dumps(one) + "\n" for one in requests))
    worker.serve(lines, answers, {"profile": str(profile), "options": {"device": "cpu"}})
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_answers_agree_with_the_decoder(profile: Path, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    one = request(prompts["image"], tmp_path)
    fields = {"inputs": str(one.inputs), "settings": one.settings, "task": one.task}
    ready, tuned, plain = served(profile, {**fields, "plain": False}, {**fields, "plain": True})
    assert Path(ready["ready"]) == Path(autotune.__file__).parent
    stats = autotune.load(profile, device="cpu").generate(**prompts["image"], **one.settings).stats
    found = answer(tuned)
    assert found.accepted_lengths == stats.accepted_lengths and sum(found.accepted_lengths) > 0
    assert (found.target_forwards, found.draft_forwards) == (stats.target_forwards, stats.draft_forwards)
    assert found.verified_nodes == sum(stats.verified_nodes) and found.plain_steps == 0
    assert found.new_tokens == 20 and found.decode_ms > 0
    other = answer(plain)
    assert other.tokens_sha256 == found.tokens_sha256
    assert (other.target_forwards, other.draft_forwards) == (19, 0)


def test_a_worker_process_decodes_and_reports_failures(
    profile: Path, prompts: dict[str, Inputs], tmp_path: Path
) -> None:
    """A real process: the tokens of plain decoding, and an error as one line."""
    one = request(prompts["image"], tmp_path)
    process = WorkerProcess(Side("head", "this code", profile), device="cpu", log=tmp_path / "log")
    try:
        tuned, plain = (process.decode(one, plain=plain) for plain in (False, True))
        assert tuned.tokens_sha256 == plain.tokens_sha256 and tuned.draft_forwards > plain.draft_forwards == 0
        with pytest.raises(RuntimeError, match=r"head.*gone\.safetensors"):
            process.decode(replace(one, inputs=tmp_path / "gone.safetensors"), plain=False)
    finally:
        process.close()


def test_plain_decoding_steps_as_the_profile_does(profile: Path) -> None:
    """With its mode, sizes and threads: an eager baseline would flatter a compiled draft."""
    steps = {"mode": "fixed", "capture_sizes": (1, 8, 160), "threads": 1}
    DecodingProfile.load(profile).model_copy(update=steps).save(profile)
    side = worker.SideDecoder(str(profile), {"device": "cpu"})
    assert (
        {name: getattr(side.plain, name) for name in steps}
        == {name: getattr(side.tuned, name) for name in steps}
        == steps
    )


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
    ready, broken = served(profile, {"plain": False})
    assert "ready" in ready and broken["error"] == "KeyError: 'inputs'"
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
class Model: device = "cpu"
class Decoder:
    target_model, mode, capture_sizes, threads, prefill_threads = Model(), "eager", (), 1, 1
    def __init__(self, target=None, draft=None, **steps): ...
    def prepare(self): ...
def load(profile, device):
    {load}
"""


def process(code: Path, folder: Path) -> WorkerProcess:
    side = Side(name="base", label="main (0123456789)", profile=folder / "profile.json", code=code)
    return WorkerProcess(side, device="cpu", log=folder / "base.log")


def test_a_process_runs_the_code_of_its_side(tmp_path: Path) -> None:
    made = process(stub(tmp_path, STUB.format(load="return Decoder()")), tmp_path)
    made.wait()
    made.close()
    assert made._process.returncode == 0
    assert "a library that prints" in (tmp_path / "base.log").read_text(), "in the log, not in the answers"
    other = process(tmp_path, tmp_path)
    other.side = replace(other.side, label="x", code=tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"the base, x, imports autotune from .*, not from .*elsewhere"):
        other.wait()
    other.close()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("raise ValueError('no such' + chr(10) + 'profile')", "ValueError: no such profile"),
        ("import os; os._exit(3)", "a library that prints"),
    ],
)
def test_a_base_that_cannot_load_fails_in_one_line(load: str, message: str, tmp_path: Path) -> None:
    made = process(stub(tmp_path, STUB.format(load=load)), tmp_path)
    with pytest.raises(UserError) as caught:
        made.wait()
    made.close()
    assert str(caught.value) == (
        f"the base, main (0123456789), cannot decode with the profile: {message}; see its log {tmp_path / 'base.log'}"
    )
