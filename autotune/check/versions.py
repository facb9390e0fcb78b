"""Versions that are compared: profiles with the code and environment that decode them. Loads no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
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
# Files that list requirements; of pyproject.toml only two keys do.
REQUIREMENTS = ("constraints.txt", "requirements.txt", "uv.lock", "poetry.lock")


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


@contextmanager
def base_of(against: str, profile: Path, folder: Path, *, with_code: bool = False) -> Iterator[Version]:
    """The version that ``--against`` names: a profile that this code decodes, or a git revision.

    A revision is checked out into a worktree beside the repository. Its profile is the file of the same path, or
    ``profile`` if git does not track it.

    Args:
        with_code: decode with the revision's code, if the repository contains autotune, and in a new environment if it
            requires other packages.

    Raises:
        UserError: no such revision, or packages that cannot be installed.
    """
    if Path(against).is_file():
        yield Version("base", against, Path(against))
        return
    root = Path(_git(against, Path.cwd(), "rev-parse", "--show-toplevel"))
    commit = _git(against, root, "rev-parse", "--verify", "--quiet", f"{against}^{{commit}}")
    tree, profile = folder / "base", profile.resolve()
    _git(against, root, "worktree", "add", "--detach", str(tree), commit)
    try:
        if profile.is_relative_to(root) and (tree / profile.relative_to(root)).is_file():
            profile = tree / profile.relative_to(root)
        version = Version("base", f"{against} ({commit[:10]})", profile)
        yield _with_code(version, against, root, tree, folder / "environment") if with_code else version
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, capture_output=True)


def _with_code(version: Version, against: str, root: Path, tree: Path, environment: Path) -> Version:
    """The version with the code and the interpreter of its revision."""
    code, python = PACKAGE, sys.executable
    if (tree / "autotune/__init__.py").exists():
        code = tree
        if PACKAGE.resolve() != root:
            raise UserError(
                f"this repository contains autotune, but the one that runs is in {PACKAGE}; install this one (pip install "
                f"-e .), or run it with PYTHONPATH={root}"
            )
    if requirements(root) != requirements(tree):
        python = _new_environment(against, tree, environment)
    return Version(version.name, version.label, version.profile, code, python)


def _new_environment(against: str, tree: Path, environment: Path) -> str:
    """The interpreter of a new environment with the packages that the revision requires."""
    python = environment / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for name, option in (("constraints.txt", "-c"), ("requirements.txt", "-r")):
        if (tree / name).exists():
            install += [option, str(tree / name)]
    if (tree / "pyproject.toml").exists():
        install.append(str(tree))
    for command in ([sys.executable, "-m", "venv", str(environment)], install):
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        if done.returncode != 0:
            lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            reason = [line for line in lines if line.startswith("ERROR:")] + lines[-1:] + ["no reason given"]
            raise UserError(
                f"--against {against} does not build: {reason[0]}; choose a revision whose packages can be installed"
            )
    return str(python)


def requirements(folder: Path) -> dict[str, Any]:
    """The packages that a checkout requires."""
    contents: dict[str, Any] = {name: (folder / name).read_bytes() for name in REQUIREMENTS if (folder / name).exists()}
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return contents
    return contents | {key: project.get(key) for key in ("dependencies", "requires-python")}


def _git(against: str, folder: Path, *arguments: str) -> str:
    """The output of a git command."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"--against {against}: neither a file nor a git revision of a repository around this folder "
            f"(git {arguments[0]} failed: {error}); give a profile, correct the name, or fetch the revision first (CI often "
            "fetches the last commit only)"
        ) from None


class WorkerProcess(Arm, AbstractContextManager["WorkerProcess"]):
    """A worker in a separate process, as an arm. The constructor starts it; its first use waits until it has loaded.

    No times of the prefill are known of it, so that no run is ever taken for a disturbed one and repeated.

    Args:
        inputs: folder with the safetensors files of the processed prompts, by their hash.
        options: of ``autotune.load``.
        log: file to which the standard error of the process is appended.
    """

    def __init__(self, version: Version, inputs: Path, options: Mapping[str, str], *, log: Path) -> None:
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
        return Decoded(
            arm=self.key,
            prompt=prompt.name,
            prompt_sha256=prompt.sha256,
            **self._decode(prompt, prompt.settings.generation),
        )

    def _decode(self, prompt: WorkloadPrompt, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. The first one waits until the models are loaded.

        Raises:
            UserError: another copy of autotune was imported.
        """
        request = {"inputs": str(self.inputs / f"{prompt.sha256}.safetensors"), "settings": settings}
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
