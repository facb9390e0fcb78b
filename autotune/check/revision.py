"""The base of a comparison from git: a worktree of the revision, in an environment like its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.check.launch import Side
from autotune.errors import UserError

# Files that say what is installed; ``pyproject.toml`` also says other things.
REQUIREMENTS = ("constraints.txt", "requirements.txt", "uv.lock", "poetry.lock")
PACKAGE = Path("autotune/__init__.py")


@contextmanager
def checked_out(ref: str, profile: Path, head: Side, folder: Path) -> Iterator[Side]:
    """The side that decodes with the code of ``ref``: with the profile that it has at the same path, or the head's
    where git does not know it, and in this environment where it asks for the same packages, else in one made for it.

    Raises:
        UserError: no repository, no such revision, or one whose packages cannot be installed.

    """
    root = Path(
        _git(
            ["rev-parse", "--show-toplevel"],
            Path.cwd(),
            f"--against {ref}: no such file, and this folder is in no git repository; give a profile, or run it in the repository",
        )
    )
    commit = _git(
        ["rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"],
        root,
        f"--against {ref}: neither a file nor a git revision; fetch it first (CI often fetches the last commit alone), or mend the name",
    )
    tree = folder / "base"
    _git(["worktree", "add", "--detach", str(tree), commit], root, f"--against {ref}: git cannot check it out")
    try:
        yield Side(
            name="base",
            what=f"{ref} ({commit[:10]})",
            profile=_profile_at(commit, profile, root, tree),
            code=_code(root, tree, head),
            python=_python(ref, root, tree, folder / "environment"),
        )
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, capture_output=True)


def _profile_at(commit: str, profile: Path, root: Path, tree: Path) -> Path:
    path = profile.resolve()
    inside = path.relative_to(root) if path.is_relative_to(root) else None
    return tree / inside if inside is not None and (tree / inside).is_file() else path


def _code(root: Path, tree: Path, head: Side) -> Path:
    """Where the base's package is: in its worktree, if this repository is the one that holds it."""
    if not (tree / PACKAGE).exists():
        return head.code
    if head.code.resolve() != root:
        raise UserError(
            f"this repository holds autotune, and the one that runs is that in {head.code}; install this one (pip install -e .), or run it with PYTHONPATH={root}"
        )
    return tree


def _python(ref: str, root: Path, tree: Path, environment: Path) -> str:
    """This interpreter, or one of an environment with the packages that the revision asks for."""
    if packages(root) == packages(tree):
        return sys.executable
    python = environment / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for name in ("constraints.txt", "requirements.txt"):
        if (tree / name).exists():
            install += ["-c" if name == "constraints.txt" else "-r", str(tree / name)]
    if (tree / "pyproject.toml").exists():
        install.append(str(tree))
    for command in ([sys.executable, "-m", "venv", str(environment)], install):
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        if done.returncode != 0:
            lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            reason = next(
                (line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no reason given"
            )
            raise UserError(
                f"--against {ref} does not build: {reason}; choose a revision whose packages can be installed"
            )
    return str(python)


def packages(folder: Path) -> dict[str, Any]:
    """What a checkout asks to be installed."""
    found: dict[str, Any] = {name: (folder / name).read_bytes() for name in REQUIREMENTS if (folder / name).exists()}
    if (folder / "pyproject.toml").exists():
        try:
            project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
        except tomllib.TOMLDecodeError:
            return {**found, "pyproject.toml": "unreadable"}
        found |= {key: project.get(key) for key in ("dependencies", "requires-python")}
    return found


def _git(arguments: list[str], folder: Path, failure: str) -> str:
    """What git says.

    Raises:
        UserError: git is not there, or refuses.
    """
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("--against a revision needs git, which is not here; install it, or give a profile") from None
    if done.returncode != 0:
        raise UserError(failure)
    return done.stdout.strip()
