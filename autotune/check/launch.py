"""Worker processes: ``worker.py`` run by the code and environment of one side of a comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from pydantic import ValidationError

from autotune.errors import UserError
from autotune.files import Document

WORKER = Path(__file__).with_name("worker.py")


class Decoded(Document):
    """What a worker says of one prompt."""

    first_token_ms: float
    decode_ms: float
    """From the first token to the last, by the worker's own clock."""
    new_tokens: int
    tokens_sha256: str
    target_forwards: int
    draft_forwards: int
    plain_steps: int
    verified_nodes: int
    accepted_lengths: list[int]


@dataclass(frozen=True)
class Request:
    """A prompt as workers take it: processed once, by one processor, for both sides."""

    name: str
    sha256: str
    inputs: Path
    """A safetensors file."""
    settings: dict[str, Any]
    task: str
    point: int
    """Of the profile: which of its points decodes it."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: which code decodes by which profile, in which environment."""

    name: str
    """``base`` or ``head``."""
    what: str
    """For people: a commit, a profile."""
    profile: Path
    code: Path = Path(__file__).parents[2]
    """The folder that holds the package."""
    python: str = sys.executable


class Worker(Protocol):
    """One side at work."""

    def decode(self, request: Request, *, plain: bool) -> Decoded:
        """One prompt, by the side's profile or plainly."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


Launch = Callable[[Side], Worker]


class WorkerProcess:
    """A side in a process of its own. Made, it loads; the first ``decode`` or ``wait`` waits for that."""

    def __init__(self, side: Side, *, device: str, log: Path) -> None:
        self.side, self.log = side, log
        settings = json.dumps({"profile": str(side.profile), "device": device})
        # A session of its own: Ctrl-C is ours to answer, and workers end when their requests do.
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
        """Until the models are loaded.

        Raises:
            UserError: the side's code cannot load the profile, or is not the code that was meant.
        """
        if not self._is_ready:
            where = Path(str(self._read().get("ready")))
            if where.parent.resolve() != self.side.code.resolve():
                raise UserError(
                    f"the {self.side.name}, {self.side.what}, imports autotune from {where}, not from {self.side.code}; "
                    "uninstall the copy that comes first, or run check in a clean environment"
                )
            self._is_ready = True

    def decode(self, request: Request, *, plain: bool) -> Decoded:
        """One prompt, by the side's profile or plainly."""
        self.wait()
        fields = {
            "inputs": str(request.inputs),
            "settings": request.settings,
            "task": request.task,
            "plain": plain,
        }
        self._write(fields)
        answer = self._read()
        try:
            return Decoded.model_validate(answer)
        except ValidationError:
            raise AssertionError(f"a worker's answer is not what its own file says: {answer}") from None

    def close(self) -> None:
        """Ends it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, fields: dict[str, Any]) -> None:
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(fields) + "\n")
            pipe.flush()
        except BrokenPipeError:
            self._fail(self._last_line())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail(self._last_line())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self._fail(str(answer["error"]))
        return answer

    def _fail(self, reason: str) -> None:
        raise UserError(
            f"the {self.side.name}, {self.side.what}, cannot decode with the profile: {reason}; its log is {self.log}"
        )

    def _last_line(self) -> str:
        """Of what a worker that died has printed."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with code {self._process.wait()}"
