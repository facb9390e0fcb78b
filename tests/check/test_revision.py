"""A git revision as the base: its own files and, if its requirements differ, its own environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.check.revision import checked_out, requirements
from autotune.check.worker_process import Side
from autotune.errors import UserError

PYPROJECT = '[project]\nname = "thing"\nversion = "1"\ndependencies = ["numpy>=2"]\n'


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a profile, its requirements and two commits."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, profile_json="old", pyproject_toml=PYPROJECT)
    commit(folder, profile_json="new", pyproject_toml=PYPROJECT + "[tool.ruff]\nline-length = 9\n")
    monkeypatch.chdir(folder)
    return folder


def head(folder: Path) -> Side:
    return Side(name="head", label="as it is here", profile=folder / "profile.json")


def test_the_base_decodes_with_the_profile_of_its_revision(repository: Path, tmp_path: Path) -> None:
    with checked_out("HEAD~1", Path("profile.json"), head(repository), tmp_path) as base:
        assert base.profile.read_text() == "old"
        assert base.label == f"HEAD~1 ({git(repository, 'rev-parse', 'HEAD~1')[:10]})"
        assert base.python == sys.executable, "settings of a linter are not requirements"
        assert base.code == head(repository).code, (
            "the project does not contain autotune: both sides run the installed one"
        )
    assert git(repository, "worktree", "list").count("\n") == 0, "the worktree is removed"
    (repository / "mine.json").write_text("mine")
    with checked_out("HEAD~1", Path("mine.json"), head(repository), tmp_path) as base:
        assert base.profile == repository / "mine.json", "git does not track it"


def test_a_revision_of_this_project_decodes_with_its_own_code(repository: Path, tmp_path: Path) -> None:
    (repository / "autotune").mkdir()
    (repository / "autotune" / "__init__.py").touch()
    commit(repository)
    side = Side(name="head", label="as it is here", profile=repository / "profile.json", code=repository)
    with checked_out("HEAD", Path("profile.json"), side, tmp_path) as base:
        assert base.code == tmp_path / "base"
    with (
        pytest.raises(UserError, match=r"this repository contains autotune, but the one that runs is in .*PYTHONPATH="),
        checked_out("HEAD", Path("profile.json"), head(repository), tmp_path),
    ):
        pass
    assert git(repository, "worktree", "list").count("\n") == 0


def test_other_requirements_get_a_new_environment(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repository, pyproject_toml=PYPROJECT.replace("numpy>=2", "numpy>=2.1"), constraints_txt="numpy==2.1\n")
    commit(repository, pyproject_toml=PYPROJECT)
    commands = []
    run = subprocess.run

    def noted(command: list[str], **options: object) -> object:
        if command[0] == "git":
            return run(command, **options)  # type: ignore[call-overload]
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", noted)
    with checked_out("HEAD~1", Path("profile.json"), head(repository), tmp_path) as base:
        assert base.python == str(tmp_path / "environment" / "bin" / "python")
        create, install = commands
        assert create[1:] == ["-m", "venv", str(tmp_path / "environment")]
        tree = tmp_path / "base"
        assert install[0] == base.python and install[-3:] == ["-c", str(tree / "constraints.txt"), str(tree)]


@pytest.mark.nightly
def test_a_revision_that_does_not_build_is_refused_in_one_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    commit(repository, pyproject_toml=PYPROJECT.replace("numpy>=2", "no-such-thing>=2"))
    commit(repository, pyproject_toml=PYPROJECT)
    with (
        pytest.raises(
            UserError, match=r"--against HEAD~1 does not build: ERROR: .*; choose a revision whose packages"
        ) as caught,
        checked_out("HEAD~1", Path("profile.json"), head(repository), tmp_path),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert git(repository, "worktree", "list").count("\n") == 0


def test_an_unknown_revision_is_refused(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(ref: str) -> None:
        with checked_out(ref, Path("profile.json"), head(repository), tmp_path):
            pass

    with pytest.raises(UserError, match="--against mian: neither a file nor a git revision; fetch it first"):
        opened("mian")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--against main: no such file, and this folder is not in a git repository"):
        opened("main")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="--against a revision needs git, which was not found"):
        opened("main")


def test_only_requirements_are_compared(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "requirements.txt").write_text("torch\n")
    project = {"dependencies": ["numpy>=2"], "requires-python": None}
    assert requirements(tmp_path) == {"requirements.txt": b"torch\n", **project}
