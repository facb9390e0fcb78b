"""A folder with an engine whose times are simulated, a model, prompts, and the profile of a search."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotune.cli.main import main
from autotune.engines import engine
from autotune.engines.engine_server import EngineServer
from tests.check.timed_engine import SCRIPT, running_in_thread
from tests.engines.recorded_llama import LIMIT, PROMPTS
from tests.imports import ROOT


def autotune(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.fixture
def engine_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``profile.json``."""
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
    options = ["--set", f"llama.cpp:command={tmp_path}/llama-server", "--set", "llama.cpp:draft=draft.gguf"]
    done = autotune("search", "--backend", "llama.cpp=model.gguf", *options, "--workload", "prompts.jsonl")
    assert done.exit_code == 0, done.output
    return tmp_path
