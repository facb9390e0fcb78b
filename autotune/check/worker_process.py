"""Worker processes: ``worker.py`` run with the code and environment of one side of a comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.documents.decoded import Decoded
from autotune.errors import UserError
from autotune.evaluation.arms import Arm
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import WARM_UP_TOKENS

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its code, its profile and its environment."""

    name: str
    """``base`` or ``head``."""
    label: str
    """For people: a commit, or a profile's path."""
    profile: Path
    code: Path = Path(__file__).parents[2]
    python: str = sys.executable
    dtype: str | None = None
    """Data type of the target; None: the profile's."""


class WorkerProcess(Arm, AbstractContextManager["WorkerProcess"]):
    """A worker in a separate process, as an arm. The constructor starts it; its first use waits until it has loaded.

    No times of the prefill are known of it, so that no run is ever taken for a disturbed one and repeated.

    Args:
        requests: safetensors files of inputs by name of the prompt, which are processed once for both sides.
    """

    def __init__(self, side: Side, requests: Mapping[str, Path], *, device: str, log: Path) -> None:
        self.name = self.key = side.name
        self.side, self.requests, self.log = side, requests, log
        options = {"device": device, **({} if side.dtype is None else {"dtype": side.dtype})}
        settings = json.dumps({"profile": str(side.profile), "options": options})
        # In a new session Ctrl-C reaches the parent only; workers end when their input is closed.
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [side.python, "-P", str(WORKER), settings],
                env={**os.environ, "PYTHONPATH": str(side.code)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._is_ready = False

    def wait(self) -> None:
        """Wait until the models are loaded.

        Raises:
            UserError: the side's code cannot load the profile, or another copy of autotune was imported.
        """
        if not self._is_ready:
            package = Path(str(self._read().get("ready")))
            if package.parent.resolve() != self.side.code.resolve():
                raise UserError(
                    f"the {self.side.name}, {self.side.label}, imports autotune from {package}, not from {self.side.code}; "
                    "uninstall the copy that comes first, or run check in a clean environment"
                )
            self._is_ready = True

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        """Warm up: decode the start of the last coming prompt."""
        for prompt in prompts[-1:]:
            few = min(WARM_UP_TOKENS, prompt.settings.max_new_tokens)
            self._decode(prompt, {**prompt.settings.generation, "max_new_tokens": few})

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        answer = self._decode(prompt, prompt.settings.generation)
        return Decoded(arm=self.key, prompt=prompt.name, prompt_sha256=prompt.sha256, **answer)

    def _decode(self, prompt: WorkloadPrompt, settings: Mapping[str, Any]) -> dict[str, Any]:
        self.wait()
        inputs = str(self.requests[prompt.name])
        self._write({"inputs": inputs, "settings": settings})
        return self._read()

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # a full pipe of a worker that has ended
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, fields: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(fields) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail(self._last_line())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail(self._last_line())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self._fail(str(answer["error"]), is_fault=answer.get("is_fault", False))
        return answer

    def _fail(self, reason: str, *, is_fault: bool = False) -> None:
        """
        Raises:
            RuntimeError: a fault of the head. A base with one is a mistake in the choice of the base.
            UserError: anything else, such as a worker that the system has ended.
        """
        text = (
            f"the {self.side.name}, {self.side.label}, cannot decode with the profile: {reason}; see its log {self.log}"
        )
        if is_fault and self.side.name == "head":
            raise RuntimeError(text)
        raise UserError(text)

    def _last_line(self) -> str:
        """The last line in the log of a worker that has died."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with code {self._process.wait()}"
