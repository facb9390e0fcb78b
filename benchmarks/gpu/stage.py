"""The process of a stage of the GPU battery (``benchmarks/gpu_battery.py`` starts it)."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DEVICE = "cuda:0"


class Job(NamedTuple):
    """A stage's arguments. All stages share a working folder, which is the current one."""

    function: str
    """Module of this folder and function, ``rounds.short``; it takes the job."""
    file: str
    """The stage's JSON. Beside it is the folder ``documents``, for those that the command writes."""
    switches: list[str]
    dry: bool
    """Tiny models on a rehearsed device."""

    def save(self, result: Any) -> None:
        """Write what has been measured so far, whole or not at all."""
        Path(f"{self.file}.partial").write_text(json.dumps(result, indent=1))
        os.replace(f"{self.file}.partial", self.file)


def main() -> None:
    """Run the job that the command line gives as JSON."""
    job = Job(**json.loads(sys.argv[1]))
    module, _, name = job.function.partition(".")
    run = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
    if not job.dry:
        return run(job)
    from autotune.modeling.loading import load_model
    from tests.rehearsal import Rehearsal

    load_model("digits/target")  # nothing is rehearsed that transformers does when it first loads a model
    with Rehearsal(num_devices=1):
        run(job)
