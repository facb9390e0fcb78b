"""Stages that run commands as a user does: the tests of devices, ``autotune measure`` and ``autotune search``."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.cli.main import main
from autotune.modeling.loading import load_processor
from benchmarks.gpu.models import load_random, write_models
from benchmarks.gpu.stage import DEVICE, ROOT, Job

POOL = "autotune.runtime.model_pool"
PROMPTS = 16  # of a split


def pytest(job: Job) -> None:
    """The tests that run on a device; of a dry run, those of one module, on the device that they rehearse."""
    chosen = "tests/modeling/test_graph_runner.py" if job.dry else "tests"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-x", "-p", "no:cacheprovider", chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    job.save({"code": done.returncode, "summary": done.stdout.strip().splitlines()[-1:]})
    sys.exit(done.returncode)


def autotune(job: Job, found: list[dict[str, Any]], *arguments: str) -> None:
    """Run the command; its error, if it fails, is in the stage's JSON. Large targets have random weights, and the
    bundled tokenizer; drafts have weights of their own.
    """
    arguments = *arguments, *(["--mode", "cuda-graph"] if job.dry else [])  # a rehearsed self-test takes long
    row: dict[str, Any] = {"command": " ".join(arguments), "error": None}
    with (
        mock.patch("autotune.modeling.sharded.load_model", lambda name, **options: load_random(job, name, **options)),
        mock.patch(f"{POOL}.load_processor", lambda name, **_: load_processor(name, or_bundled=True)),
    ):
        try:
            main(arguments, standalone_mode=False)
        except Exception as problem:
            row["error"] = f"{type(problem).__name__}: {problem}"[:300]
    found.append(row)
    job.save(found)


def models(job: Job, name: str) -> list[str]:
    """Options for a target, its head and retrieval, and prompts of about 600 tokens."""
    rng, lines = random.Random(0), []
    for number in range(2 * PROMPTS):
        rows = " ".join(f"Row {row} reads {rng.randrange(10)}." for row in range(3 if job.dry else 60))
        tokens = 12 if job.dry else 64
        lines.append({"prompt": rows, "split": ("tune", "evaluate")[number % 2], "max_new_tokens": tokens})
    Path("prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return ["--target", name, "--draft", write_models(job, name), "--draft", "retrieval", "--workload", "prompts.jsonl"]


def documents(job: Job) -> Path:
    """The folder of cost tables and profiles."""
    folder = Path(job.file).parent / "documents"
    folder.mkdir(exist_ok=True)
    return folder


def measure(job: Job) -> None:
    """Cost tables for ``profiles``: of the large targets by ``autotune measure``, and of the bundled pair by a search,
    which also prices the subnets that searches for another device want.
    """
    found: list[dict[str, Any]] = []
    for name in ("Llama-3.1-8B", "Qwen2.5-VL-7B"):
        output = ["--budget", "1s" if job.dry else "30s", "-o", str(documents(job) / f"{name}.cost.json")]
        autotune(job, found, "measure", "--device", DEVICE, *models(job, name), *output)
    search(job, found, "digits", "60s", *(models(job, "Llama-3.1-8B") if job.dry else []))


def search(job: Job, found: list[dict[str, Any]], name: str, budget: str, *options: str) -> None:
    """A search; its profile and cost table are kept."""
    output = ["-o", str(documents(job) / f"{name}.json"), "--study", name]
    autotune(job, found, "search", "--device", DEVICE, "--budget", "15s" if job.dry else budget, *options, *output)
    for table in Path(".autotune").glob(f"{name}*/*.cost.json"):
        shutil.copy(table, documents(job) / f"{name}.cost.json")


def search_smollm2(job: Job) -> None:
    """The default search of SmolLM2, which ``drafts/smollm2`` packages; of a tiny target in a dry run."""
    real = ["--target", "smollm2", "--dtype", "bfloat16"]
    search(job, [], "smollm2", "2m", *(models(job, "Llama-3.1-8B") if job.dry else real))


def search_8b(job: Job) -> None:
    """A short search of Llama-3.1-8B with random weights: captures and prices, not acceptance."""
    search(job, [], "Llama-3.1-8B", "80s", *models(job, "Llama-3.1-8B"))
