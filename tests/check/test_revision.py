"""A git revision as the base: its own files and, if its requirements differ, its own environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from autotune.check import revision
from autotune.check.revision import base_of, requirements
from autotune.check.worker_process import PACKAGE, Version
from autotune.errors import UserError

PYPROJECT = '[project]\nname = "thing"\nversion = "1"\ndependencies = ["numpy>=2"]\n'


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    return subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def commit(**files: str) -> None:
    for name, text in files.items():
        Path(name.replace("_", ".")).write_text(text)
    git("add", "-A")
    git("commit", "-q", "-m", "change")


Opened = Callable[[str, str], AbstractContextManager[Version]]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens a base in a project with a profile, its requirements and two commits."""
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    git("init", "-q", "-b", "main")
    commit(profile_json="old", pyproject_toml=PYPROJECT)
    commit(profile_json="new", pyproject_toml=PYPROJECT + "[tool.ruff]\nline-length = 9\n")
    return lambda against, profile: base_of(against, Path(profile), tmp_path, with_code=True)


def test_the_base_decodes_with_the_profile_of_its_revision(opened: Opened) -> None:
    with opened("HEAD~1", "profile.json") as base:
        assert base.profile.read_text() == "old"
        assert base.label == f"HEAD~1 ({git('rev-parse', 'HEAD~1')[:10]})"
        assert base.python == sys.executable, "settings of a linter are not requirements"
        assert base.code == PACKAGE, "the project does not contain autotune: both sides run the installed one"
    assert git("worktree", "list").count("\n") == 0, "the worktree is removed"
    Path("mine.json").write_text("mine")
    with opened("HEAD~1", "mine.json") as base:
        assert base.profile == Path("mine.json").resolve(), "git does not track it"
    with opened("mine.json", "profile.json") as base:
        assert (base.label, base.profile, base.code) == ("mine.json", Path("mine.json"), PACKAGE), "another profile"


def test_a_revision_of_this_project_decodes_with_its_own_code(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("autotune").mkdir()
    Path("autotune/__init__.py").touch()
    commit()
    message = r"this repository contains autotune, but the one that runs is in .*PYTHONPATH="
    with pytest.raises(UserError, match=message), opened("HEAD", "profile.json"):
        pass
    assert git("worktree", "list").count("\n") == 0
    monkeypatch.setattr(revision, "PACKAGE", Path.cwd())
    with opened("HEAD", "profile.json") as base:
        assert base.code == tmp_path / "base"


def test_other_requirements_get_a_new_environment(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(pyproject_toml=PYPROJECT.replace("numpy>=2", "numpy>=2.1"), constraints_txt="numpy==2.1\n")
    commit(pyproject_toml=PYPROJECT)
    commands, run = [], subprocess.run

    def noted(command: list[str], **options: object) -> object:
        if command[0] == "git":
            return run(command, **options)  # type: ignore[call-overload]
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", noted)
    with opened("HEAD~1", "profile.json") as base:
        environment, tree = tmp_path / "environment", tmp_path / "base"
        assert base.python == str(environment / "bin" / "python")
        create, install = commands
        assert create[1:] == ["-m", "venv", str(environment)]
        assert install[0] == base.python and install[-3:] == ["-c", str(tree / "constraints.txt"), str(tree)]


@pytest.mark.nightly
def test_a_revision_that_does_not_build_is_refused_in_one_line(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    commit(pyproject_toml=PYPROJECT.replace("numpy>=2", "no-such-thing>=2"))
    commit(pyproject_toml=PYPROJECT)
    message = r"^--against HEAD~1 does not build: ERROR: .*; choose a revision whose packages[^\n]*$"
    with pytest.raises(UserError, match=message), opened("HEAD~1", "profile.json"):
        pass
    assert git("worktree", "list").count("\n") == 0


@pytest.mark.parametrize("missing", ["revision", "repository", "git"])
def test_an_unknown_revision_is_refused(
    missing: str, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "repository":
        monkeypatch.chdir(tmp_path)
    if missing == "git":
        monkeypatch.setenv("PATH", "")
    message = r"^--against mian: neither a file nor a revision of a git repository around this folder[^\n]*fetch[^\n]*$"
    with pytest.raises(UserError, match=message), opened("mian", "profile.json"):
        pass


def test_only_requirements_are_compared(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "requirements.txt").write_text("torch\n")
    project = {"dependencies": ["numpy>=2"], "requires-python": None}
    assert requirements(tmp_path) == {"requirements.txt": b"torch\n", **project}
