"""The worker: its answers through the public interface alone, and failures."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

import autotune
from autotune.check import worker
from autotune.check.worker_process import PACKAGE, WORKER, Version, WorkerProcess
from autotune.documents.decoded import tokens_key
from autotune.errors import UserError
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.sample_documents import decoding_profile
from tests.tiny_models import Inputs, Pair

PROMPT = WorkloadPrompt("prompt", Prompt(prompt="prompt", max_new_tokens=20), ())


def process(folder: Path, name: str = "base", code: Path = PACKAGE) -> WorkerProcess:
    """A worker of the profile ``p.json`` in a folder, and of the inputs of ``PROMPT``."""
    inputs = {name: folder / f"{name}.safetensors" for name in ("prompt", "gone")}
    version = Version(name, "main (0123456789)", folder / "p.json", code)
    return WorkerProcess(version, inputs, {"device": "cpu"}, log=folder / "log")


def test_a_worker_process_decodes_and_reports_failures(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    """A real process: warmed up, with the decoder's answer and counts, and an error as one line."""
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft, hardware=fingerprint("cpu")).save(tmp_path / "p.json")
    tensors = {name: value.contiguous() for name, value in prompts["image"].items()}
    save_file(tensors, tmp_path / "prompt.safetensors")
    with process(tmp_path, "head") as head:
        head.prepare([PROMPT])
        found = head.decode(PROMPT)
        assert (found.arm, found.prompt, found.prompt_sha256) == ("head", "prompt", PROMPT.sha256)
        decoder = autotune.load(tmp_path / "p.json", device="cpu")
        output = decoder.generate(**prompts["image"], **PROMPT.settings.generation)
        stats = output.stats
        assert found.tokens_sha256 == tokens_key(output.sequences[0, stats.prompt_tokens :].tolist())
        assert found.accepted_lengths == stats.accepted_lengths and sum(found.accepted_lengths) > 0
        assert (found.target_forwards, found.draft_forwards) == (stats.target_forwards, stats.draft_forwards)
        assert found.verified_nodes == sum(stats.verified_nodes) and found.plain_steps == 0
        assert found.new_tokens == 20 and found.decode_ms > 0
        with pytest.raises(RuntimeError, match=r"head.*gone\.safetensors"):  # a fault of the code under test
            head.decode(replace(PROMPT, name="gone"))
    assert "Traceback" in (tmp_path / "log").read_text()


def test_its_clock_runs_from_the_first_token_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.1, 1.5, 1.6, 1.75])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(times))
    watch = worker.Stopwatch()
    for tokens in ("the prompt", "its first token", "the next"):
        watch.put(tokens)
    watch.end()
    assert watch[-1] - watch[1] == pytest.approx(0.25)


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


@pytest.mark.parametrize(
    ("load", "package", "message"),
    [
        ("raise ValueError('no such' + chr(10) + 'profile')", "", "cannot decode with the profile: ValueError: no such profile; see its log"),
        ("import os; os._exit(3)", "", "cannot decode with the profile: a library that prints; see its log"),
        ("return None", "elsewhere", "imports autotune from [^;]*, not from [^;]*elsewhere; uninstall the copy"),
    ],
    ids=["raises", "dies", "another copy"],
)  # fmt: skip
def test_a_base_that_cannot_load_fails_in_one_line(load: str, package: str, message: str, tmp_path: Path) -> None:
    """A base is another version's code: its faults are mistakes in the choice of the base."""
    (tmp_path / "autotune").mkdir()
    stub = f'print("a library that prints")\ndef load(profile, device):\n    {load}\n'
    (tmp_path / "autotune" / "__init__.py").write_text(stub)
    with process(tmp_path, code=tmp_path) as base:
        base.version = replace(base.version, code=tmp_path / package)
        with pytest.raises(UserError, match=rf"^the base, main \(0123456789\), {message}[^\n]*$"):
            base.decode(PROMPT)
    assert base._process.returncode is not None
    assert "a library that prints" in (tmp_path / "log").read_text(), "in the log, not in the answers"
