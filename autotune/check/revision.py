"""A git revision as the base of a comparison: a worktree, with an environment for its requirements."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.check.worker_process import Side
from autotune.errors import UserError

# Files that list requirements; of pyproject.toml only two keys do.
REQUIREMENTS = ("constraints.txt", "requirements.txt", "uv.lock", "poetry.lock")
PACKAGE = Path("autotune/__init__.py")


@dataclass(frozen=True)
class Checkout:
    """A worktree of a revision, beside the repository."""

    label: str
    root: Path
    tree: Path

    def beside(self, path: Path) -> Path:
        """The file of the same path in the revision, or the given one if git does not track it."""
        path = path.resolve()
        in_tree = self.tree / path.relative_to(self.root) if path.is_relative_to(self.root) else path
        return in_tree if in_tree.is_file() else path


@contextmanager
def worktree(ref: str, folder: Path) -> Iterator[Checkout]:
    """
    Raises:
        UserError: no repository, or no such revision.
    """
    top_level = _git(
        ["rev-parse", "--show-toplevel"],
        Path.cwd(),
        f"--against {ref}: no such file, and this folder is not in a git repository; give a profile, or run it in the repository",
    )
    root, tree = Path(top_level), folder / "base"
    commit = _git(
        ["rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"],
        root,
        f"--against {ref}: neither a file nor a git revision; fetch it first (CI often fetches the last commit only), or "
        "correct the name",
    )
    _git(["worktree", "add", "--detach", str(tree), commit], root, f"--against {ref}: git cannot check it out")
    try:
        yield Checkout(f"{ref} ({commit[:10]})", root, tree)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, capture_output=True)


@contextmanager
def checked_out(ref: str, profile: Path, head: Side, folder: Path) -> Iterator[Side]:
    """The side that decodes with the code of ``ref``, in this environment if both require the same packages, or else in
    a new one.

    Raises:
        UserError: no such revision, or packages that cannot be installed.
    """
    with worktree(ref, folder) as found:
        yield Side(
            name="base",
            label=found.label,
            profile=found.beside(profile),
            code=_code_in(found.tree, found.root, head),
            python=_python_for(ref, found.root, found.tree, folder / "environment"),
            dtype=head.dtype,
        )


def _code_in(tree: Path, root: Path, head: Side) -> Path:
    """The folder of the base's package: the worktree, if the repository contains autotune."""
    if not (tree / PACKAGE).exists():
        return head.code
    if head.code.resolve() != root:
        raise UserError(
            f"this repository contains autotune, but the one that runs is in {head.code}; install this one (pip install -e .), "
            f"or run it with PYTHONPATH={root}"
        )
    return tree


def _python_for(ref: str, root: Path, tree: Path, environment: Path) -> str:
    """This interpreter, or one in a new environment with the packages that the revision requires."""
    if requirements(root) == requirements(tree):
        return sys.executable
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
            errors = [line for line in lines if line.startswith("ERROR:")]
            reason = [*errors[:1], *lines[-1:], "no reason given"][0]
            raise UserError(
                f"--against {ref} does not build: {reason}; choose a revision whose packages can be installed"
            )
    return str(python)


def requirements(folder: Path) -> dict[str, Any]:
    """The packages that a checkout requires."""
    contents: dict[str, Any] = {name: (folder / name).read_bytes() for name in REQUIREMENTS if (folder / name).exists()}
    if (folder / "pyproject.toml").exists():
        try:
            project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
        except tomllib.TOMLDecodeError:
            return {**contents, "pyproject.toml": "unreadable"}
        contents |= {key: project.get(key) for key in ("dependencies", "requires-python")}
    return contents


def _git(arguments: list[str], folder: Path, failure: str) -> str:
    """The output of a git command."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("--against a revision needs git, which was not found; install it, or give a profile") from None
    if done.returncode != 0:
        raise UserError(failure)
    return done.stdout.strip()
