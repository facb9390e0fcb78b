"""Engines that play transcripts of real servers back: an executable, a model's file or folder, and prompts."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.engines import engine
from autotune.engines.engine_server import EngineServer
from autotune.engines.llama_cpp import LlamaBackend
from autotune.engines.process import running
from autotune.engines.vllm import VllmBackend
from autotune.workloads.prompt import WorkloadPrompt
from tests.engines.recorded_llama import RecordedServer, http_server, text_prompts
from tests.engines.recorded_vllm import RecordedVllm
from tests.imports import ROOT

SCRIPT = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.engines.recorded_llama import serve
serve(sys.argv[1:])
"""
VLLM_SCRIPT = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.engines.recorded_llama import serve
from tests.engines.recorded_vllm import RecordedVllm
serve(sys.argv[1:], RecordedVllm)
"""


@pytest.fixture
def prompts() -> list[WorkloadPrompt]:
    return text_prompts()


def write_script(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(script.format(python=sys.executable, root=str(ROOT)))
    path.chmod(0o755)


@contextmanager
def running_here(words: Sequence[str], name: str) -> Iterator[tuple[str, Any]]:
    """``process.running`` in a thread of this process, which takes no time to start; servers that end are processes."""
    if (
        Path(words[0]).parent.name != "bin"
        or {"--bogus", "--dies", "--killed", "--lacks-second", "--lacks-drafts", "--old"} & {*words}
        or is_replaced(words[0])
    ):
        with running(words, name) as started:
            yield started
        return
    kind = RecordedVllm if words[1] == "serve" else RecordedServer
    server = http_server([*words[1:]], kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", SimpleNamespace(pid=os.getpid())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def is_replaced(executable: str) -> bool:
    return "recorded_llama" not in Path(executable).read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``model.gguf``, ``model``, ``draft``, and ``bin`` with llama-server and vllm."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF general.file_type\x04\0\0\0\x03\0\0\0 tokenizer.chat_template")
    configs = {
        "model": {"torch_dtype": "bfloat16", "vocab_size": 9, "model_type": "gemma3"},
        "draft": {"draft_vocab_size": 8},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    write_script(tmp_path / "bin" / "llama-server", SCRIPT)
    write_script(tmp_path / "bin" / "vllm", VLLM_SCRIPT)
    monkeypatch.setattr(engine, "running", running_here)
    monkeypatch.setattr(EngineServer, "cpu_ms", lambda server: 0.0)  # what it takes to play back says nothing
    monkeypatch.setattr(VllmBackend, "pause_s", 0.0)
    return tmp_path


def llama(folder: Path, switches: str = "", **options: object) -> LlamaBackend:
    return LlamaBackend("model.gguf", command=f"{folder / 'bin' / 'llama-server'} {switches}", **options)  # type: ignore[arg-type]


def vllm(folder: Path, switches: str = "", **options: object) -> VllmBackend:
    return VllmBackend("model", command=f"{folder / 'bin' / 'vllm'} {switches}", **options)  # type: ignore[arg-type]
