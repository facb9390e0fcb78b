"""Worker processes: ``worker.py`` run with the code and environment of one version of the program. Loads no torch."""

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
PACKAGE = Path(__file__).parents[2]
"""The folder that contains the package that runs."""


@dataclass(frozen=True)
class Version:
    """A profile with the code and the environment that decode it."""

    name: str
    """``base`` or ``head``."""
    label: str
    """For people: a commit, or a profile's path."""
    profile: Path
    code: Path = PACKAGE
    python: str = sys.executable


class WorkerProcess(Arm, AbstractContextManager["WorkerProcess"]):
    """A worker in a separate process, as an arm. The constructor starts it; its first use waits until it has loaded.

    No times of the prefill are known of it, so that no run is ever taken for a disturbed one and repeated.

    Args:
        inputs: safetensors files of the processed prompts, by name of the prompt.
        options: of ``autotune.load``.
        log: file to which the standard error of the process is appended.
    """

    def __init__(self, version: Version, inputs: Mapping[str, Path], options: Mapping[str, str], *, log: Path) -> None:
        self.name = self.key = version.name
        self.version, self.inputs, self.log = version, inputs, log
        settings = json.dumps({"profile": str(version.profile), "options": options})
        # In a new session Ctrl-C reaches the parent only; workers end when their input is closed.
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [version.python, "-P", str(WORKER), settings],
                env={**os.environ, "PYTHONPATH": str(version.code)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        """Warm up: decode the start of the answer to the next prompt."""
        few = min(WARM_UP_TOKENS, prompts[0].settings.max_new_tokens)
        self._decode(prompts[0], {**prompts[0].settings.generation, "max_new_tokens": few})

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        answer = self._decode(prompt, prompt.settings.generation)
        return Decoded(arm=self.key, prompt=prompt.name, prompt_sha256=prompt.sha256, **answer)

    def _decode(self, prompt: WorkloadPrompt, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. The first one waits until the models are loaded.

        Raises:
            UserError: another copy of autotune was imported.
        """
        request = {"inputs": str(self.inputs[prompt.name]), "settings": settings}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a worker that has ended gives no answer
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer, version = self._read(), self.version
        if "ready" not in answer:
            return answer
        if Path(answer["ready"]).parent.resolve() != version.code.resolve():
            raise UserError(
                f"the {version.name}, {version.label}, imports autotune from {answer['ready']}, not from {version.code}; "
                "uninstall the copy that comes first, or run check in a clean environment"
            )
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

    def _read(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            RuntimeError: a fault of the head. A base with one is a mistake in the choice of the base.
            UserError: anything else, such as a worker that the system has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" not in answer:
            return answer
        version = self.version
        text = f"the {version.name}, {version.label}, cannot decode with the profile: {answer['error']}; see its log {self.log}"
        if answer.get("is_fault") and version.name == "head":
            raise RuntimeError(text)
        raise UserError(text)

    def _last_words(self) -> str:
        """The last line in the log of a worker that has died."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with code {self._process.wait()}"
