"""``autotune check`` with the profile of an engine whose times are simulated: what is found in twenty checks each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotune.cli.main import main
from autotune.documents.decoding_profile import DecodingProfile
from autotune.engines import engine
from autotune.engines.engine_server import EngineServer
from tests.check.timed_engine import SCRIPT, running_in_thread
from tests.engines.recorded_llama import LIMIT, PROMPTS
from tests.imports import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with an engine, a model and the profile of a search."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "running", running_in_thread)
    monkeypatch.setattr(EngineServer, "cpu_ms", lambda server: 0.0)
    for name in ("model", "draft"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF general.file_type\x04\0\0\0\x03\0\0\0 tokenizer.chat_template")
    (tmp_path / "llama-server").write_text(SCRIPT.format(python=sys.executable, root=str(ROOT)))
    (tmp_path / "llama-server").chmod(0o755)
    rows = [
        {"prompt": text, "max_new_tokens": LIMIT, "split": "tune" if number in (0, 3) else "evaluate"}
        for number, text in enumerate(PROMPTS)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    chosen = ["--backend", "llama.cpp=model.gguf", "--set", f"llama.cpp:command={tmp_path}/llama-server"]
    chosen += ["--set", "llama.cpp:draft=draft.gguf"]
    done = autotune("search", *chosen, "--workload", "prompts.jsonl", "--budget", "60s", "-o", "profile.json")
    assert done.exit_code == 0, done.output
    return tmp_path


def autotune(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def checks(folder: Path, switches: str, seeds: Sequence[int], machine: float = 1.0) -> list[tuple[int, str]]:
    """Exit codes and last lines of checks of another build, on a machine that takes ``machine`` times as long."""
    results = []
    for seed in seeds:
        command = f"{folder}/llama-server --seed {seed} --machine {machine} {switches}"
        done = autotune("check", "profile.json", "--engine-command", command)
        results.append((done.exit_code, done.output.splitlines()[-1]))
        print(f"seed {seed}, {switches or 'unchanged'}: exit code {results[-1][0]}, {results[-1][1]}")
    return results


@pytest.mark.parametrize("seeds", [range(1, 4), pytest.param(range(4, 21), marks=pytest.mark.nightly)])
def test_an_unchanged_engine_passes_and_a_slower_build_or_a_token_less_is_found(
    folder: Path, seeds: Sequence[int]
) -> None:
    assert DecodingProfile.load("profile.json").point.label.startswith("draft-simple")
    assert checks(folder, "", seeds, machine=1.3) == [(0, "passed")] * len(seeds)
    for code, verdict in checks(folder, "--slower 1.15", seeds):
        assert code == 1 and verdict.startswith("failed: time over plain decoding's +"), verdict
    for code, verdict in checks(folder, "--loses-one", seeds):
        assert code == 1 and "1 have worse counts, 0 other counts" in verdict, verdict
