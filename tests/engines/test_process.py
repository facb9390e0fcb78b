"""Engines that are started: a script in the place of vLLM, and what vLLM's log says when it refuses its settings."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from autotune.engines.engine_server import EngineServer
from autotune.engines.process import refusal, running
from autotune.engines.vllm import GENERATED, VllmServer

COMMAND = """vllm serve a/target --dtype float32 --speculative-config '{"model": "a draft"}'"""
SCRIPT = """#!{python}
import http.server, json, os, pathlib, subprocess, sys

if "--refuse" in sys.argv:
    sys.exit("ValueError: the settings are refused.")
worker = subprocess.Popen(["sleep", "600"])
pathlib.Path({record!r}).write_text(json.dumps({{"arguments": sys.argv[1:], "pids": [os.getpid(), worker.pid]}}))
ANSWERS = {{
    "/health": "",
    "/metrics": "vllm:generation_tokens_total 7.0\\n",
    "/version": '{{"version": "0.32.0"}}',
    "/v1/models": '{{"data": [{{"id": "a/target", "max_model_len": 64}}]}}',
}}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ANSWERS[self.path].encode())


http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """An executable that answers as a vLLM does that decodes nothing, and has a worker; it records both in
    ``record.json``.
    """
    path = tmp_path / "vllm"
    path.write_text(SCRIPT.format(python=sys.executable, record=str(tmp_path / "record.json")))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_an_engine_runs_the_exported_command_and_is_stopped(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its workers, also where what uses it fails, and where a proxy is set for other machines."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    words = [str(script), *shlex.split(COMMAND)[1:], "--max-num-seqs", "4"]
    with pytest.raises(RuntimeError, match="a bench that fails"), running(words, "vllm") as (url, _):
        server = VllmServer(url)
        assert (server.build, server.alias, server.context) == ("0.32.0", "a/target", 64)
        assert server.metrics() == {GENERATED: 7}
        record = json.loads((script.parent / "record.json").read_text())
        assert all(psutil.pid_exists(pid) for pid in record["pids"])
        raise RuntimeError("a bench that fails")
    assert record["arguments"][:-1] == [*words[1:], "--port"]
    deadline = time.monotonic() + 600.0  # a signal may take a moment
    while any(is_running(pid) for pid in record["pids"]):
        assert time.monotonic() < deadline, "the engine or its worker still runs"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is of Linux")
def test_an_engine_ends_with_a_program_that_is_killed(script: Path) -> None:
    program = (
        "import time\n"
        "from autotune.engines.process import running\n"
        f"with running([{str(script)!r}], 'vllm'):\n"
        "    print('ready', flush=True); time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        engine, worker = json.loads((script.parent / "record.json").read_text())["pids"]
        process.kill()
    psutil.Process(worker).kill()
    deadline = time.monotonic() + 600.0
    while is_running(engine):
        assert time.monotonic() < deadline, "the engine still runs"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_cause_of_a_failure_is_found_in_the_log() -> None:
    """The first exception, without the prefixes of vLLM's processes; warnings that quote exceptions are none."""
    prefix = "(APIServer pid=1) "
    worker = "(VllmWorker-0 pid=2) ERROR 11-23 17:02:26 [multiproc_executor.py:953] "
    warning = f"{prefix}WARNING 11-23 17:26:48 [system_utils.py:255] This can cause errors like `OSError: Too many open files`."
    end = "Exception: WorkerProc initialization failed due to an exception in a background process."
    memory = "Available memory on node 0 is less than desired."
    pydantic = "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig"
    for lines, cause in (
        ((warning, f"{worker}ValueError: {memory}", f"{prefix}{end}"), memory),
        ((pydantic, "  Value error, must be equal. [type=value_error, input_value=1]"), "must be equal."),
        (("usage: vllm", "vllm: error: unrecognized arguments: --no"), "unrecognized arguments: --no"),
        (
            (
                "0.00.191.102 I srv    load_model: loading draft model, 'draft.gguf'",
                "0.00.424.680 E llama_model_load: error loading model: tensor 'token_embd.weight' not found",
                "0.00.425.353 E srv  llama_server: exiting due to model loading error",
            ),
            "error loading model: tensor 'token_embd.weight' not found",
        ),
        (("something else", ""), "something else"),
        ((), "it says nothing"),
    ):
        assert refusal("\n".join(lines)) == cause, lines


def test_the_cpu_time_of_a_server_is_that_of_its_process_and_workers() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    server: Any = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
    before = EngineServer.cpu_ms(server)
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert EngineServer.cpu_ms(server) - before >= 150
        worker.communicate(b"\n")
