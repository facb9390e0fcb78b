"""The base of a comparison: another profile, or a git revision with an environment for its requirements."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.check.worker_process import PACKAGE, Version
from autotune.errors import UserError

# Files that list requirements; of pyproject.toml only two keys do.
REQUIREMENTS = ("constraints.txt", "requirements.txt", "uv.lock", "poetry.lock")


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
            f"--against {against}: neither a file nor a revision of a git repository around this folder "
            f"(git {arguments[0]} failed: {error}); give a profile, correct the name, or fetch the revision first (CI often "
            "fetches the last commit only)"
        ) from None
