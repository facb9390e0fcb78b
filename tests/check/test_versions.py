"""Versions that are compared: git revisions with their files and environments, and processes that run their code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

import autotune
from autotune.check import versions, worker
from autotune.check.versions import PACKAGE, WORKER, Version, WorkerProcess, base_of
from autotune.documents.decoded import tokens_key
from autotune.errors import UserError
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.sample_documents import decoding_profile
from tests.tiny_models import Inputs, Pair

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
    monkeypatch.setattr(versions, "PACKAGE", Path.cwd())
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
    message = r"^--against mian: neither a file nor a git revision of a repository around this folder[^\n]*fetch[^\n]*$"
    with pytest.raises(UserError, match=message), opened("mian", "profile.json"):
        pass


# -------- processes

PROMPT = WorkloadPrompt("prompt", Prompt(prompt="prompt", max_new_tokens=20), ())


def process(folder: Path, name: str = "base", code: Path = PACKAGE) -> WorkerProcess:
    """A worker of the profile ``p.json`` in a folder, and of the inputs of ``PROMPT``."""
    version = Version(name, "main (0123456789)", folder / "p.json", code)
    return WorkerProcess(version, folder, {"device": "cpu"}, log=folder / "log")


def test_a_worker_process_decodes_and_reports_failures(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    """A real process: warmed up, with the decoder's answer and counts, and an error as one line."""
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft, hardware=fingerprint("cpu")).save(tmp_path / "p.json")
    tensors = {name: value.contiguous() for name, value in prompts["image"].items()}
    save_file(tensors, tmp_path / f"{PROMPT.sha256}.safetensors")
    with process(tmp_path, "head") as head:
        head.prepare([PROMPT])
        found = head.decode(PROMPT)
        assert (found.arm, found.prompt, found.prompt_sha256) == ("head", "prompt", PROMPT.sha256)
        decoder = autotune.load(tmp_path / "p.json", device="cpu")
        output = decoder.generate(**prompts["image"], **PROMPT.settings.generation)
        stats = output.stats
        assert found.tokens_sha256 == tokens_key(output.sequences[0, stats.prompt_tokens :].tolist())
        assert found.accepted_lengths == stats.accepted_lengths and sum(found.accepted_lengths) > 0
        assert (found.target_forwards, found.draft_forwards) == (stats.target_forwards, stats.draft_forwards)
        assert found.verified_nodes == sum(stats.verified_nodes) and found.plain_steps == 0
        assert found.new_tokens == 20 and found.decode_ms > 0
        with pytest.raises(RuntimeError, match=r"head.*\.safetensors"):  # a fault of the code under test
            head.decode(replace(PROMPT, settings=Prompt(prompt="gone")))
    assert "Traceback" in (tmp_path / "log").read_text()


def test_its_clock_runs_from_the_first_token_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.1, 1.5, 1.6, 1.75])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(times))
    watch = worker.Stopwatch()
    for tokens in ("the prompt", "its first token", "the next"):
        watch.put(tokens)
    watch.end()
    assert watch[-1] - watch[1] == pytest.approx(0.25)


def test_it_uses_only_the_public_interface() -> None:
    """Other commits of autotune run it too."""
    names = set()
    for node in ast.walk(ast.parse(WORKER.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert all(module == "autotune" or not module.startswith("autotune") for module in modules)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "autotune":
            names.add(node.attr)
    assert names - {"__file__"} <= set(autotune.__all__)


@pytest.mark.parametrize(
    ("load", "package", "message"),
    [
        ("raise ValueError('no such' + chr(10) + 'profile')", "", "cannot decode with the profile: ValueError: no such profile; see its log"),
        ("import os; os._exit(3)", "", "cannot decode with the profile: a library that prints; see its log"),
        ("return None", "elsewhere", "imports autotune from [^;]*, not from [^;]*elsewhere; uninstall the copy"),
    ],
    ids=["raises", "dies", "another copy"],
)  # fmt: skip
def test_a_base_that_cannot_load_fails_in_one_line(load: str, package: str, message: str, tmp_path: Path) -> None:
    """A base is another version's code: its faults are mistakes in the choice of the base."""
    (tmp_path / "autotune").mkdir()
    stub = f'print("a library that prints")\ndef load(profile, device):\n    {load}\n'
    (tmp_path / "autotune" / "__init__.py").write_text(stub)
    with process(tmp_path, code=tmp_path) as base:
        base.version = replace(base.version, code=tmp_path / package)
        with pytest.raises(UserError, match=rf"^the base, main \(0123456789\), {message}[^\n]*$"):
            base.decode(PROMPT)
    assert base._process.returncode is not None
    assert "a library that prints" in (tmp_path / "log").read_text(), "in the log, not in the answers"
